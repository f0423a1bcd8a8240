"""What the tests saw of kernels, for an evidence file: ``HAL_EVIDENCE=FILE pytest`` writes one, of all workers.

Every verdict of conformance counts, whichever test asked for it: on this machine's own device as ``ran``, on
the facts of another for which torch or a double stands in as ``emulated``. Tests whose kernels run in a
process of their own, or are only compiled, tell it by ``record``. What a runtime binds that fell back is kept
too. Tests that do wrong on purpose are marked ``spoils``, and nothing of them is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hal
from hal.conformance import Verdict
from hal.evidence import FellBack, Row, Skipped, Suite, evidence_of, merged, rows_of, write

PLAIN = "torch"  # the backend whose kernels are the CPU's own, whatever facts chose them

verdicts: set[tuple[str, str, Verdict]] = set()  # kind, profile, verdict
fell_back: set[FellBack] = set()
spoils = False  # whether the test that runs does wrong on purpose


def record(kind: str, on: str, verdict: Verdict) -> None:
    """A case that was seen in another way than by conformance here; ``on``: the profile that gave the facts."""
    if not spoils:
        verdicts.add((kind, on, verdict))


def watch() -> None:
    """Have conformance and runtimes tell what they do, before any test module has taken a name of theirs."""
    from hal import conformance
    from hal.conformance import run

    verify, bind = run.verify_kernel, hal.Runtime._bind

    def verified(runtime: hal.Runtime, op: Any, kernel: str, strided: bool = True) -> Iterator[Verdict]:
        for verdict in verify(runtime, op, kernel, strided):
            own = runtime.place != "cpu" or runtime.device.value("vendor") == "cpu"
            kind = "ran" if own or kernel.split(".")[0] == PLAIN else "emulated"
            record(kind, runtime.device.label if runtime.place == "cpu" else "", verdict)
            yield verdict

    def bound(self: hal.Runtime, *args: Any, **named: Any) -> Any:
        group = bind(self, *args, **named)
        if self.load and not spoils:
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            found = [c for c in group.choices.values() if c.fell_back]
            fell_back.update(FellBack(c.op.title(), c.kernels(), f"{c.fell_back} ({test})") for c in found)
        return group

    run.verify_kernel = conformance.verify_kernel = verified
    hal.Runtime._bind = bound  # type: ignore[method-assign]


def packed() -> dict[str, list[tuple[str, ...]]]:
    """What a worker saw, in values that travel."""
    return {
        "verdicts": [(k, on, v.op, v.kernel, v.case, v.status, v.detail) for k, on, v in verdicts],
        "fell_back": [(f.op, f.kernel, f.why) for f in fell_back],
    }


def unpack(seen: dict[str, list[tuple[str, ...]]]) -> None:
    """What a worker saw is seen here."""
    verdicts.update((kind, on, Verdict(*rest)) for kind, on, *rest in seen["verdicts"])  # type: ignore[arg-type]
    fell_back.update(FellBack(*row) for row in seen["fell_back"])


class Told:
    """The tests' reports, each once: a worker's arrive here as its own."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def add(self, report: Any) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[report.nodeid] = why.removeprefix("Skipped: ")
        elif getattr(report, "when", "") == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def suite(self) -> Suite:
        found = list(self.outcomes.values())
        skipped = tuple(Skipped(test, why) for test, why in sorted(self.skipped.items()))
        return Suite(found.count("passed"), found.count("failed"), skipped)


def finish(told: Told, file: Path) -> None:
    """Write the file, of the device that is here and of kernels that are registered."""
    registry = hal.Registry.installed()
    device = hal.probe(registry.backends, registry.broken)
    known = {(title, name) for title, op in hal.ops.OPS.items() for name in registry.names(op)}
    own = ("cpu", device.label) if device.value("vendor") == "cpu" else (device.label,)
    # a case that several tests saw is one
    cases = {(kind, on, v.op, v.kernel, v.case, v.status): v for kind, on, v in sorted(verdicts, key=str)}
    rows: list[Row] = []
    for kind, on in sorted({key[:2] for key in cases}):
        here = [v for key, v in cases.items() if key[:2] == (kind, on) and (v.op, v.kernel) in known]
        rows += rows_of(here, kind, "" if on in own else on)
    evidence = evidence_of(device, merged(rows), tuple(sorted(fell_back, key=str)), told.suite())
    file.parent.mkdir(exist_ok=True)
    write(evidence, file)
