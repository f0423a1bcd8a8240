"""``hal plan``: every choice of a whole model on a device, what it costs, what fell back."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from hal.cli.bytes import sizes
from hal.cli.common import (
    add_device,
    add_draft,
    add_json,
    broken_json,
    positive,
    print_broken,
    resolving_runtime,
)
from hal.cli.models import build
from hal.cli.show import print_json, print_table
from hal.errors import PolicyError
from hal.report import HEADS, Line, device_line, lines, size
from hal.runtime import Runtime

SCHEMA = "hal.plan/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|FOLDER", help="a published name or a checkpoint's folder")
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="ranks of tensor parallelism")
    parser.add_argument("--scheme", metavar="S", help="as if weights were quantized so, such as fp8_channel")
    add_draft(parser)
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    runtime = resolving_runtime(args)
    build(args.model, runtime, args.scheme, args.draft)
    # a force that names an op or a site that this model has not
    if unbound := runtime.unbound_forces():
        raise PolicyError("; ".join(unbound))
    data = plan_json(args.model, runtime)
    print_json(data) if args.json else _print(runtime, data)
    return 0


def plan_json(model: str, runtime: Runtime) -> dict[str, Any]:
    """The whole plan: schema ``hal.plan/1``."""
    found, costs = lines(runtime), sizes(runtime)
    refused = _refused(found, {f"backend {b.name}" for b in runtime.registry.broken})
    return {
        "schema": SCHEMA,
        "model": model,
        "device": runtime.device.label,
        "stack": runtime.device.stack,
        "policy": runtime.policy.source,
        "world": runtime.world,
        "lines": [_line(line) for line in found],
        "parameter_bytes": costs.parameters,
        "state_bytes_per_slot": costs.per_slot,
        "kv_bytes_per_token": costs.per_token,
        "conversions": [
            {"site": line.site, "sites": len(line.sites), "kernel": kernel, "bytes_per_row": each}
            for line in found
            for kernel, each in line.moves()
        ],
        "notes": list(runtime.notes),
        "broken": broken_json(runtime.registry),
        "refused": sum(refused.values()),
        "refused_by_op": refused,
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "site": line.site,
        "sites": list(line.sites),
        "op": line.choice.op.title(),
        "pieces": [{"rows": list(p.rows), "chosen": p.kernel.name} for p in line.choice.pieces],
        "layouts": {name: str(layout) for name, layout in line.choice.layouts.items()},
        "formats": line.edges(),
        "schemes": line.choice.op.quantized(),
        "fell_back": line.choice.fell_back,
    }


def _refused(found: list[Line], broken: set[str]) -> dict[str, int]:
    """By op, how many of its kernels were refused at some site, parts included."""
    pairs = {
        (choice.op.title(), candidate.kernel): None
        for line in found
        for _, choice in line.choice.walk()
        for candidate in choice.candidates
        if candidate.status == "refused" and candidate.kernel not in broken
    }
    return dict(Counter(op for op, _ in pairs))


def _print(runtime: Runtime, data: dict[str, Any]) -> None:
    print(f"{data['model']}: {device_line(runtime)}")
    found = lines(runtime)
    print_table(HEADS, [line.cells() for line in found])
    print(f"\nparameters: {size(data['parameter_bytes'])} a rank ({data['parameter_bytes']} bytes)")
    print(f"state: {size(data['state_bytes_per_slot'])} a slot, {size(data['kv_bytes_per_token'])} a token of KV")
    for note in data["notes"]:
        print(note)
    for line in found:
        for kernel, each in line.moves():
            print(f"converts: {line.name}: {kernel}, {size(each)} a row")
    fallen = [line for line in found if line.choice.fell_back]
    for line in fallen:
        print(f"fell back: {line.name}: {line.choice.fell_back}")
    print_broken(runtime.registry)
    by_op = ", ".join(f"{op} {count}" for op, count in data["refused_by_op"].items())
    print(f"kernels refused: {data['refused']}" + (f" ({by_op}); hal explain OP says why" if by_op else ""))
    if not fallen:
        print("nothing fell back")
