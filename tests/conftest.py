"""What all tests share: no policy from outside, one thread a worker, and GPU tests skipped with their reason."""

from __future__ import annotations

import os

import pytest

for name in [name for name in os.environ if name.startswith("HAL_")]:
    del os.environ[name]


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; its report stands in bench/results"))
