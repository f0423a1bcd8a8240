"""``hal bench``: every kernel that can run here, timed side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.cli.common import add_json, need_torch, positive, positives
from hal.cli.plot import by_problem, plot
from hal.cli.show import plain, print_json, print_table
from hal.errors import HalError
from hal.ops import op_class

if TYPE_CHECKING:
    from hal.ops.base import Op
    from hal.runtime import Runtime

SCHEMA = "hal.bench/1"
ROWS = (1, 8, 64, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="+", metavar="OP", help="logical ops, see hal ops")
    parser.add_argument("--model", metavar="NAME|FOLDER", help="problems of this model; default: each op's first case")
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="sizes of a rank of so many")
    parser.add_argument("--rows", type=positives, default=ROWS, metavar="M,...", help="default: 1,8,64,256")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens before a decode step")
    parser.add_argument("--kernel", metavar="NAME", help="only this kernel")
    parser.add_argument("--peers", metavar="MODULE:FUNCTION", help="an adapter that times others' kernels beside ours")
    parser.add_argument("--rotate", type=positive, default=200, metavar="MB", help="bytes that go round; default: 200")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, a PNG; needs matplotlib")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    ops = [op_class(name) for name in args.ops]
    need_torch("bench")
    from hal.bench import ceiling
    from hal.registry import Registry
    from hal.runtime import Runtime

    runtime = Runtime(registry=Registry.installed())
    peers = _adapter(args.peers) if args.peers else None
    most = ceiling(runtime) if runtime.can_capture else ceiling(runtime, 2**28)
    results = [row for op in ops for row in _results(runtime, op, args, peers, most)]
    answer = {
        "schema": SCHEMA,
        "device": runtime.device.label,
        "stack": runtime.device.stack,
        "facts": runtime.device.known(),
        "timed": "graph replay" if runtime.can_capture else "one after the other, the host's time in it",
        "ceiling": most,
        "rotated": args.rotate * 1_000_000,
        "results": results,
    }
    if args.out:
        args.out.write_text(json.dumps(answer, indent=1, ensure_ascii=False) + "\n")
    if args.plot:
        plot(answer, args.plot)
    if args.json:
        print_json(answer)
    else:
        _print(answer)
    return int(not any(row["us"] is not None for row in results))


def _adapter(name: str) -> Any:
    """The function that ``MODULE:FUNCTION`` names."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise HalError(f"--peers {name}: {error}") from None


def _problems(runtime: Runtime, op: type[Op[..., Any]], args: argparse.Namespace) -> list[Op[..., Any]]:
    """The model's problems of an op, each once, as if for one rank; else the op's first case."""
    if not args.model:
        return [op.cases()[0].op]
    from dataclasses import replace

    from hal.cli.decisions import decisions
    from hal.cli.models import build
    from hal.runtime import Runtime

    plan = Runtime(runtime.device, runtime.policy, runtime.registry, load=False, world=args.tp)
    build(args.model, plan)
    found = dict.fromkeys(replace(d.choice.op, world=1) for d in decisions(plan, op))
    if not found:
        raise HalError(f"{args.model} has no {op.title()} on {runtime.device.label}, as an op or as a part of one")
    return list(found)


def _results(
    runtime: Runtime, op: type[Op[..., Any]], args: argparse.Namespace, peers: Any, most: float
) -> Iterator[dict[str, Any]]:
    from hal.bench import microseconds, problem

    names = [n for n in runtime.registry.names(op) if args.kernel in (None, n)]
    if not names:
        raise HalError(f"{op.title()}: no kernel {args.kernel}; it has {', '.join(runtime.registry.names(op))}")
    for size in _problems(runtime, op, args):
        chosen = runtime.resolver.resolve((size,), runtime.policy.at("bench"))[0]
        for rows in args.rows:
            common = {"op": op.title(), "problem": plain(size), "rows": rows}
            last = None
            for name in names:
                row = {**common, "kernel": name, "chosen": chosen.at(rows).kernel.name == name}
                try:
                    given = problem(runtime, size, name, rows, args.context, args.rotate * 1_000_000)
                    us = microseconds(runtime, given.calls)
                except HalError as error:
                    whole = str(error).splitlines()[0]
                    reason = whole.partition(f"cannot be had on {runtime.device.label}: ")[2] or whole
                    yield {**row, "us": None, "bytes": None, "of_ceiling": None, "launches": None, "reason": reason}
                    continue
                yield {**row, **_figures(us, given.bytes, most), "launches": given.launches, "reason": ""}
                last = given
            if peers and last is not None:
                for name, calls in peers(last).items():
                    figures = _figures(microseconds(runtime, calls), last.bytes, most)
                    row = {**common, "kernel": name, "chosen": False, **figures}
                    yield {**row, "launches": None, "reason": ""}


def _figures(us: float, moved: int, most: float) -> dict[str, Any]:
    return {"us": us, "bytes": moved, "of_ceiling": moved / most / (us * 1e-6) if us else None}


def _print(answer: dict[str, Any]) -> None:
    print(f"device {answer['device']}, {answer['timed']}; ceiling {answer['ceiling'] / 1e12:.2f} TB/s")
    for op, rows in by_problem(answer["results"]):
        sizes = ", ".join(f"{k}={v}" for k, v in rows[0]["problem"].items() if isinstance(v, int) and k != "world")
        print(f"\n{op} ({sizes})")
        timed = sorted((r for r in rows if r["us"] is not None), key=lambda r: (r["rows"], r["us"]))
        print_table(
            ("rows", "kernel", "us", "MB", "of ceiling", "launches", ""),
            [
                (r["rows"], r["kernel"], f"{r['us']:.2f}", f"{r['bytes'] / 1e6:.2f}", _share(r["of_ceiling"]),
                 r["launches"], "chosen" if r["chosen"] else "")
                for r in timed
            ],
        )  # fmt: skip
        refused = {(r["kernel"], r["reason"]) for r in rows if r["us"] is None}
        for kernel, reason in sorted(refused):
            print(f"refused: {kernel}: {reason}")


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
