"""``hal verify``: every kernel that can run here, on its op's cases, against the float64 oracle."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.cli.common import add_json, broken_json, need_file, need_torch, print_broken
from hal.cli.show import print_json, print_table
from hal.errors import HalError, UnknownName
from hal.ops import OPS, op_class

if TYPE_CHECKING:
    from hal.conformance import Verdict
    from hal.ops.base import Op
    from hal.runtime import Runtime

SCHEMA = "hal.verify/1"
STATUSES = ("passed", "failed", "refused")
STICKY = ("AcceleratorError", "illegal memory access", "misaligned address", "launch failure")
LOST = "the device's context is lost, and the rest was not run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops")
    parser.add_argument("--kernel", metavar="NAME", help="only this kernel")
    parser.add_argument("--evidence", type=Path, metavar="FILE", help="write what ran, see docs/ci.md")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    ops = [op_class(name) for name in args.ops] or list(OPS.values())
    need_torch("verify")
    need_file("--evidence", args.evidence)
    from hal.probing import probe
    from hal.registry import Registry
    from hal.runtime import Runtime

    registry = Registry.installed()
    runtime = Runtime(probe(registry.backends, registry.broken), registry=registry)
    verdicts = list(_verdicts(runtime, ops, args.kernel))
    failures = [v for v in verdicts if v.status == "failed"]
    stopped = LOST if verdicts and _loses_device(verdicts[-1]) else ""
    asked = [op.title() for op in ops] if args.ops else []
    unverified = [] if stopped else _unverified(verdicts, asked, args.kernel)
    counts = _counts(verdicts)
    if args.evidence:
        from hal.conformance import fallbacks
        from hal.evidence import evidence_of, rows_of, write

        write(evidence_of(runtime.device, rows_of(verdicts), fallbacks(runtime, ops), note=stopped), args.evidence)
    status = int(bool(failures or unverified or registry.broken))
    if args.json:
        print_json(
            {
                "schema": SCHEMA,
                "device": runtime.device.label,
                "stack": runtime.device.stack,
                "results": counts,
                "failures": [_row(v) for v in failures],
                "refusals": [_row(v) for v in verdicts if v.status == "refused"],
                "unverified": unverified,
                "stopped": stopped,
                "broken": broken_json(registry),
            }
        )
        return status
    print(f"device {runtime.device.label} ({runtime.device.value('vendor')} {runtime.device.value('arch')})")
    print_table(("op", "kernel", *STATUSES), [tuple(row.values()) for row in counts])
    for row in counts:
        if row["refused"] and not row["passed"] and not row["failed"]:
            found = dict.fromkeys(v.detail for v in verdicts if (v.op, v.kernel) == (row["op"], row["kernel"]))
            print(f"refused: {row['op']} on {row['kernel']}: {'; '.join(found)}")
    for v in failures:
        print(f"failed: {v.op} on {v.kernel}, case {v.case!r}: {v.detail}")
    for missed in unverified:
        print(f"nothing verified: {missed['what']}: {missed['why']}")
    print_broken(registry)
    if stopped:
        print(f"stopped after {verdicts[-1].op} on {verdicts[-1].kernel}: {stopped}")
    print(", ".join(f"{sum(row[name] for row in counts)} {name}" for name in STATUSES))
    return status


def _verdicts(runtime: Runtime, ops: list[type[Op[..., Any]]], kernel: str | None) -> Iterator[Verdict]:
    from hal.backend import said
    from hal.conformance import Verdict, verify_kernel

    known = {name for op in ops for name in runtime.registry.names(op)}
    if kernel is not None and kernel not in known:
        lost = "".join(f"; backend {b.name} is broken: {b.error}" for b in runtime.registry.broken)
        raise HalError(f"{UnknownName('kernel', kernel, known)}{lost}")
    for op in ops:
        for name in runtime.registry.names(op):
            if kernel not in (None, name):
                continue
            try:
                for verdict in verify_kernel(runtime, op, name):
                    yield verdict
                    if _loses_device(verdict):
                        return
            except Exception as error:  # noqa: BLE001 - a kernel may raise anything; the others still have their turn
                verdict = Verdict(op.title(), name, "any", "failed", f"raised {said(error)}; later cases were not run")
                yield verdict
                if _loses_device(verdict):
                    return


def _loses_device(verdict: Verdict) -> bool:
    """Whether a kernel raised what every later call on the device would raise too."""
    _, raised, error = verdict.detail.partition("raised ")
    return verdict.status == "failed" and bool(raised) and any(sign in error for sign in STICKY)


def _unverified(verdicts: list[Verdict], asked: list[str], kernel: str | None) -> list[dict[str, str]]:
    """What was asked for by name of which no case ran, and why."""
    wanted = [(op, [v for v in verdicts if v.op == op]) for op in asked]
    if kernel is not None and not asked:
        wanted = [(kernel, verdicts)]
    named = f" {kernel}" if kernel else ""
    return [
        {"what": what, "why": "all refused" if found else f"no kernel{named}"}
        for what, found in wanted
        if all(v.status == "refused" for v in found)
    ]


def _counts(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for v in verdicts:
        row = found.setdefault((v.op, v.kernel), {"op": v.op, "kernel": v.kernel, **dict.fromkeys(STATUSES, 0)})
        row[v.status] += 1
    return list(found.values())


def _row(verdict: Verdict) -> dict[str, str]:
    return {"op": verdict.op, "kernel": verdict.kernel, "case": verdict.case, "detail": verdict.detail}
