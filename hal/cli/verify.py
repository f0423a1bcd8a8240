"""``hal verify``: every kernel that can run here, on its op's cases, against the float64 oracle."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hal.cli.common import add_json
from hal.cli.show import print_json, print_table
from hal.errors import HalError, UnknownName
from hal.ops import OPS, op_class

if TYPE_CHECKING:
    from hal.conformance import Verdict
    from hal.ops.base import Op
    from hal.runtime import Runtime

SCHEMA = "hal.verify/1"
STATUSES = ("passed", "failed", "refused")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops")
    parser.add_argument("--kernel", metavar="NAME", help="only this kernel")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    ops = [op_class(name) for name in args.ops] or list(OPS.values())
    if not _has_torch():
        raise HalError("verify runs kernels and needs torch, which is not installed: pip install 'llm-hal[torch]'")
    from hal.probing import probe
    from hal.registry import Registry
    from hal.runtime import Runtime

    registry = Registry.installed()
    runtime = Runtime(probe(registry.backends, registry.broken), registry=registry)
    verdicts = list(_verdicts(runtime, ops, args.kernel))
    failures = [v for v in verdicts if v.status == "failed"]
    counts = _counts(verdicts)
    if args.json:
        print_json(
            {
                "schema": SCHEMA,
                "device": runtime.device.label,
                "stack": runtime.device.stack,
                "results": counts,
                "failures": [_row(v) for v in failures],
                "refusals": [_row(v) for v in verdicts if v.status == "refused"],
            }
        )
        return int(bool(failures))
    print(f"device {runtime.device.label} ({runtime.device.value('vendor')} {runtime.device.value('arch')})")
    print_table(("op", "kernel", *STATUSES), [tuple(row.values()) for row in counts])
    for v in failures:
        print(f"failed: {v.op} on {v.kernel}, case {v.case!r}: {v.detail}")
    print(", ".join(f"{sum(row[status] for row in counts)} {status}" for status in STATUSES))
    return int(bool(failures))


def _has_torch() -> bool:
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # blocked, or half imported
        return False


def _verdicts(runtime: Runtime, ops: list[type[Op[..., Any]]], kernel: str | None) -> Iterator[Verdict]:
    from hal.backend import said
    from hal.conformance import Verdict, verify_kernel

    known = {name for op in ops for name in runtime.registry.names(op)}
    if kernel is not None and kernel not in known:
        raise UnknownName("kernel", kernel, known)
    for op in ops:
        for name in runtime.registry.names(op):
            if kernel not in (None, name):
                continue
            try:
                yield from verify_kernel(runtime, op, name)
            except Exception as error:  # noqa: BLE001 - a kernel may raise anything; the others still have their turn
                yield Verdict(op.title(), name, "any", "failed", f"raised, later cases were not run: {said(error)}")


def _counts(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for v in verdicts:
        row = found.setdefault((v.op, v.kernel), {"op": v.op, "kernel": v.kernel, **dict.fromkeys(STATUSES, 0)})
        row[v.status] += 1
    return list(found.values())


def _row(verdict: Verdict) -> dict[str, str]:
    return {"op": verdict.op, "kernel": verdict.kernel, "case": verdict.case, "detail": verdict.detail}
