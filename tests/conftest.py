"""What all tests share: no policy from outside, one thread a worker, GPU tests skipped with their reason, evidence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import recording

EVIDENCE = os.environ.get("HAL_EVIDENCE", "")
for name in [name for name in os.environ if name.startswith("HAL_")]:
    del os.environ[name]
told = recording.Told()


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
    if EVIDENCE:
        Path(EVIDENCE).unlink(missing_ok=True)
    if EVIDENCE or _worker(config).get("evidence"):
        recording.watch()


def _worker(config: pytest.Config) -> dict[str, Any]:
    found: dict[str, Any] = getattr(config, "workerinput", {})
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["evidence"] = bool(EVIDENCE)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    recording.unpack(getattr(node, "workeroutput", {}).get("seen", recording.packed()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    recording.spoils = item.get_closest_marker("spoils") is not None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    told.add(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    told.add(report)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _worker(session.config).get("evidence"):
        session.config.workeroutput["seen"] = recording.packed()  # type: ignore[attr-defined]
    elif EVIDENCE and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        recording.finish(told, Path(EVIDENCE))
