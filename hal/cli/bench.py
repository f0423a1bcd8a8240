"""``hal bench``: every kernel that can run here, timed side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.backend import load_target, said
from hal.cli.common import add_json, filled, need_file, need_torch, positive, positives, whole
from hal.cli.plot import by_problem, figure, plot
from hal.cli.show import plain, print_json, print_table
from hal.errors import HalError
from hal.ops import op_class

if TYPE_CHECKING:
    from hal.bench import Problem
    from hal.ops.base import Op
    from hal.runtime import Runtime

SCHEMA = "hal.bench/1"
ROWS = (1, 8, 64, 256)
FIGURES = ("us", "bytes", "of_ceiling", "launches", "copies", "rotated", "host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="+", metavar="OP", help="logical ops, see hal ops")
    parser.add_argument(
        "--model", type=filled, metavar="NAME|FOLDER", help="problems of this model; default: each op's first case"
    )
    parser.add_argument(
        "--tp", type=positive, metavar="N", help="sizes of one rank of so many; only its own work is timed, no exchange"
    )
    parser.add_argument("--rows", type=positives, default=ROWS, metavar="M,...", help="default: 1,8,64,256")
    parser.add_argument("--context", type=whole, default=1024, metavar="N", help="tokens before a decode step")
    parser.add_argument("--kernel", type=filled, metavar="NAME", help="only this kernel")
    parser.add_argument(
        "--peers", type=filled, metavar="MODULE:FUNCTION", help="an adapter that times others' kernels beside ours"
    )
    parser.add_argument(
        "--rotate", type=positive, default=200, metavar="MB",
        help="bytes that go round, where so many copies of a problem may be made; default: 200",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, a PNG; needs matplotlib")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    ops = [op_class(name) for name in args.ops]
    if args.tp is not None and args.model is None:
        raise HalError(f"--tp {args.tp}: only a model's problems are divided over ranks; name one with --model")
    need_torch("bench")
    need_file("--out", args.out)
    need_file("--plot", args.plot)
    if args.plot:
        figure()
    peers = _adapter(args.peers) if args.peers else None
    from hal.bench import ceiling
    from hal.registry import Registry
    from hal.runtime import Runtime

    runtime = Runtime(registry=Registry.installed())
    work = [(size, _kernels(runtime, op, args.kernel)) for op in ops for size in _problems(runtime, op, args)]
    most = ceiling(runtime) if runtime.can_capture else ceiling(runtime, 2**28)
    results = [row for size, names in work for row in _results(runtime, size, names, args, peers, most)]
    answer = {
        "schema": SCHEMA,
        "device": runtime.device.label,
        "stack": runtime.device.stack,
        "facts": runtime.device.known(),
        "timed": "graph replay" if runtime.can_capture else "one after the other, the host's time in it",
        "ceiling": most,
        "rotate": args.rotate * 1_000_000,
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
    """The function that ``MODULE:FUNCTION`` names. Errors: HalError, whatever it is that fails."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise HalError(f"--peers is MODULE:FUNCTION, got {name!r}")
    try:
        found = load_target(name)
    except Exception as error:  # noqa: BLE001 - a stranger's module may raise anything
        raise HalError(f"--peers {name}: {said(error)}") from None
    if not callable(found):
        raise HalError(f"--peers {name}: expected a function, got {type(found).__name__}")
    return found


def _kernels(runtime: Runtime, op: type[Op[..., Any]], asked: str | None) -> list[str]:
    """Names of the kernels to time."""
    known = runtime.registry.names(op)
    if not known:
        raise HalError(f"{op.title()}: no kernel serves it")
    if asked not in (None, *known):
        raise HalError(f"{op.title()}: no kernel {asked}; it has {', '.join(known)}")
    return known if asked is None else [asked]


def _problems(runtime: Runtime, op: type[Op[..., Any]], args: argparse.Namespace) -> list[Op[..., Any]]:
    """The model's problems of an op, each once, as if for one rank; else the op's first case."""
    if args.model is None:
        return [op.cases()[0].op]
    from dataclasses import replace

    from hal.cli.decisions import decisions
    from hal.cli.models import build
    from hal.runtime import Runtime

    plan = Runtime(runtime.device, runtime.policy, runtime.registry, load=False, world=args.tp or 1)
    build(args.model, plan)
    found = dict.fromkeys(replace(d.choice.op, world=1) for d in decisions(plan, op))
    if not found:
        raise HalError(f"{args.model} has no {op.title()} on {runtime.device.label}, as an op or as a part of one")
    return list(found)


def _results(
    runtime: Runtime, size: Op[..., Any], names: list[str], args: argparse.Namespace, peers: Any, most: float
) -> Iterator[dict[str, Any]]:
    """A row for each number of rows and kernel. What fails is a row with its reason, and the others go on."""
    for rows in args.rows:
        common = {"op": size.title(), "problem": plain(size), "rows": rows}
        chosen, last = _chosen(runtime, size, rows), None
        for name in names:
            figures, given = _ours(runtime, size, name, rows, args, most)
            yield {**common, "kernel": name, "chosen": name == chosen, **figures}
            # one problem at a time, but where peers want the last that could be had
            last = given if given and peers else last
            del given
        if last is not None:
            for name, figures in _theirs(runtime, last, args.peers, peers, most):
                yield {**common, "kernel": name, "chosen": False, **figures}


def _chosen(runtime: Runtime, size: Op[..., Any], rows: int) -> str | None:
    """The kernel that the resolver picks; nothing where it can pick none: each kernel's row says why."""
    try:
        (choice,) = runtime.resolver.resolve((size,), runtime.policy.at("bench"))
    except HalError:
        return None
    return choice.at(rows).kernel.name


def _ours(
    runtime: Runtime, size: Op[..., Any], name: str, rows: int, args: argparse.Namespace, most: float
) -> tuple[dict[str, Any], Problem | None]:
    """Figures of one kernel, and the problem that it was timed on."""
    from hal.bench import problem

    try:
        given = problem(runtime, size, name, rows, args.context, args.rotate * 1_000_000)
        return _figures(runtime, given.calls, given.bytes, most, given.launches, given.captures), given
    except Exception as error:  # noqa: BLE001 - whatever a kernel or an allocation raises is its reason
        return _refused(error), None


def _theirs(
    runtime: Runtime, given: Problem, adapter: str, peers: Any, most: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and figures of others' kernels on a problem; those of the adapter itself where it fails."""
    try:
        found = _named_calls(peers(given))
    except Exception as error:  # noqa: BLE001 - whatever a stranger's code raises is its reason
        yield adapter, _refused(error)
        return
    for name, calls in found.items():
        try:
            figures = _figures(runtime, calls, given.bytes, most)
        except Exception as error:  # noqa: BLE001 - likewise
            figures = _refused(error)
        yield name, figures


def _named_calls(found: Any) -> Mapping[str, Sequence[Callable[[], Any]]]:
    """What an adapter gave, if it is what it should be."""
    wanted = "expected a dict from names to lists of calls, one for each copy"
    if not isinstance(found, Mapping):
        raise HalError(f"{wanted}; got {type(found).__name__}")
    for name, calls in found.items():
        if not (isinstance(name, str) and isinstance(calls, Sequence) and calls and all(map(callable, calls))):
            raise HalError(f"{wanted}; got {name!r}: {calls!r}")
    return found


def _figures(
    runtime: Runtime,
    calls: Sequence[Callable[[], Any]],
    moved: int,
    most: float,
    launches: int | None = None,
    captures: bool = True,
) -> dict[str, Any]:
    from hal.bench import microseconds

    us, copies = microseconds(runtime, calls, captures=captures), len(calls)
    host = not (runtime.can_capture and captures)
    share = moved / most / (us * 1e-6) if us else None
    return dict(zip(FIGURES, (us, moved, share, launches, copies, copies * moved, host), strict=True)) | {"reason": ""}


def _refused(error: Exception) -> dict[str, Any]:
    """The same keys with a reason: ours as it stands, any other with its type."""
    reason = str(error).splitlines()[0] if isinstance(error, HalError) else said(error)
    return dict.fromkeys(FIGURES) | {"reason": reason}


def _print(answer: dict[str, Any]) -> None:
    print(f"device {answer['device']}, {answer['timed']}; ceiling {answer['ceiling'] / 1e12:.2f} TB/s")
    for op, rows in by_problem(answer["results"]):
        sizes = ", ".join(f"{k}={v}" for k, v in rows[0]["problem"].items() if isinstance(v, int) and k != "world")
        print(f"\n{op} ({sizes})")
        timed = sorted((r for r in rows if r["us"] is not None), key=lambda r: (r["rows"], r["us"]))
        print_table(
            ("rows", "kernel", "us", "MB", "of ceiling", "launches", "copies", "MB of all", ""),
            [
                (r["rows"], r["kernel"], f"{r['us']:.2f}", f"{r['bytes'] / 1e6:.2f}", _share(r["of_ceiling"]),
                 r["launches"], r["copies"], f"{r['rotated'] / 1e6:.2f}", _marks(r, answer["timed"]))
                for r in timed
            ],
        )  # fmt: skip
        refused = {(r["kernel"], r["reason"]) for r in rows if r["us"] is None}
        for kernel, reason in sorted(refused):
            print(f"refused: {kernel}: {reason}")


def _marks(row: dict[str, Any], timed: str) -> str:
    """What is to be said of a row beside its figures."""
    host = row["host"] and timed == "graph replay"
    return ", ".join(text for text, said in (("chosen", row["chosen"]), ("with the host's time", host)) if said)


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
