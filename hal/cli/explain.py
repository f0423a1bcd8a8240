"""``hal explain``: which kernel an op of a model runs on a device, and the reason of every other."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from hal.choice import rows_text
from hal.cli.changes import changed, check_known, parse
from hal.cli.common import add_device, add_draft, add_json, filled, positive, print_broken, resolving_runtime
from hal.cli.decisions import AnyOp, Decision, decisions, decisions_alone
from hal.cli.models import build, elsewhere, ends, lost
from hal.cli.shape import decision_json, piece_rows
from hal.cli.show import print_json, print_table, settings_text
from hal.errors import HalError, PolicyError
from hal.ops import op_class
from hal.policy import Policy
from hal.report import device_line
from hal.runtime import Runtime

SCHEMA = "hal.explain/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help="a logical op, see hal ops")
    parser.add_argument("--model", type=filled, metavar="NAME|FOLDER", help="take the problem from this model's plan")
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="ranks of tensor parallelism")
    parser.add_argument("--rows", type=int, metavar="M", help="only what serves so many rows")
    parser.add_argument(
        "--set", type=parse, action="append", default=[], metavar="FIELD=VALUE", help="another value for a field"
    )
    parser.add_argument("--site", metavar="GLOB", help="only sites that match, such as 'layers.3.*'")
    add_draft(parser)
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    op = op_class(args.op)
    if args.rows is not None and args.rows < 0:
        raise HalError(f"--rows is 0 or more, got {args.rows}")
    # strictness is about the op that is asked about, not about the rest of the model
    runtime = resolving_runtime(args, strict=False)
    changes = dict(args.set)
    runtime, found, source = _problems(runtime, op, args.model, changes, args.site, args.draft)
    if Policy.from_environment().strict:
        _check_strict(found)
    shown = [decision_json(decision, args.rows) for decision in found]
    if args.json:
        common = {"schema": SCHEMA, "device": runtime.device.label, "stack": runtime.device.stack}
        first, *others = ({**common, **data} for data in shown)
        print_json({**first, "model": source, **({"others": others} if others else {})})
        return 0
    print(f"{op.title()}: the problem of {source}")
    print(device_line(runtime))
    for decision, data in zip(found, shown, strict=True):
        _print(decision, data)
    print_broken(runtime.registry)
    return 0


def _problems(
    runtime: Runtime, op: AnyOp, model: str | None, changes: dict[str, str], site: str | None, draft: int
) -> tuple[Runtime, list[Decision], str]:
    """The decisions about an op, and where its problem comes from: a model, else the op's first case."""
    first = runtime
    for name in [model] if model else ends():
        runtime = first.fresh(load=False)
        try:
            build(name, runtime, draft=draft)
        except HalError as error:
            # another op of the model may be what fails: this one is asked about by itself
            if found := decisions_alone(runtime, elsewhere(name, runtime, draft, failed=error), op, changes, site):
                why = str(error).splitlines()[0]
                return runtime, found, f"{name}, of which {runtime.device.label} cannot run everything: {why}"
            if model:
                raise
            continue
        if found := decisions(runtime, op, None, site):
            return runtime, _changed(runtime, op, found, changes, site), name
        if model:
            raise HalError(f"{model} has no {op.title()} on {runtime.device.label}, as an op or as a part of one")
    case = op.cases()[0]
    check_known([case.op], changes)
    runtime = first.fresh(load=False)
    runtime.bind(changed(replace(case.op, world=runtime.world), changes), "case")
    source = f"its first case, {case.name!r}, for no published model that was asked has this op on this device{lost()}"
    return runtime, decisions(runtime, op, None, site), source


def _changed(
    runtime: Runtime, op: AnyOp, found: list[Decision], changes: dict[str, str], site: str | None
) -> list[Decision]:
    if not changes:
        return found
    again = decisions(runtime, op, changes, site)
    if not again:
        raise HalError(f"with {settings_text(changes)} nothing that runs has a part {op.title()} any more")
    return again


def _check_strict(found: list[Decision]) -> None:
    for decision in found:
        if decision.fell_back:
            listed = "".join(
                f"\n  {c.kernel} (rows {rows_text(c.rows)}): {c.reason or c.status}" for c in decision.choice.candidates
            )
            raise PolicyError(f"{decision.site}: fell back under HAL_STRICT=1: {decision.fell_back}{listed}")


def _print(decision: Decision, data: dict[str, Any]) -> None:
    many = f" ({len(decision.sites)} sites)" if len(decision.sites) > 1 else ""
    print(f"\n{decision.site}{many}\n{decision.choice.op}")
    if decision.group:
        print("resolved together: " + "; ".join(f"{name}: {k}" for name, k in decision.group.items()))
    if data["layouts"]:
        print("layouts: " + ", ".join(f"{name} {layout}" for name, layout in data["layouts"].items()))
    rows = list(piece_rows(data))
    print_table(("rows", "kernel", "tier", "numerics", "settings", "why"), rows, 2)
    others = [c for c in data["candidates"] if c["status"] != "chosen"]
    if others:
        print("not chosen:")
        cells = [(rows_text(c["rows"]), c["kernel"], c["status"], c["kind"], c["reason"]) for c in others]
        print_table(("rows", "kernel", "status", "kind", "reason"), cells, 2)
    print(f"fell back: {data['fell_back']}" if data["fell_back"] else "did not fall back")
