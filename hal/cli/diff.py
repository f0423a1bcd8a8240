"""``hal diff``: two devices, the facts that differ, and what is chosen on each where that differs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hal.choice import Choice
from hal.cli.common import add_json, broken_json, filled, positive, print_broken
from hal.cli.everywhere import Answer, chosen
from hal.cli.models import ends
from hal.cli.shape import choice_json, piece_rows
from hal.cli.show import plain, print_json, print_table
from hal.device import Device, Fact, load_device
from hal.errors import HalError
from hal.policy import Policy
from hal.registry import Registry
from hal.report import pattern
from hal.runtime import Runtime

SCHEMA = "hal.diff/1"
SAME, DIFFERENT, TROUBLE = 0, 1, 2


@dataclass(frozen=True)
class Line:
    """Sites of a model that are alike, and what serves them on either device."""

    model: str
    sites: tuple[str, ...]
    op: str
    answers: tuple[Answer, Answer]

    @property
    def same(self) -> bool:
        """Whether both run the same kernels with the same settings, layouts and formats, or both nothing."""
        a, b = map(_runs, self.answers)
        return bool(a == b)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 where nothing differs, 1 where something does, 2 where there is trouble."
    for name in ("a", "b"):
        parser.add_argument(name, type=filled, metavar=name.upper(), help="a shipped profile or a dumped file")
    parser.add_argument(
        "--model", type=filled, nargs="+", action="extend", metavar="NAME|FOLDER",
        help="whose ops; default: the first and the last published model of each family",
    )  # fmt: skip
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="ranks of tensor parallelism")
    parser.add_argument("--all", action="store_true", help="what is the same, too")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    try:
        registry = Registry.installed()
        policy = replace(Policy.from_environment(), strict=False)
        devices = [load_device(name) for name in (args.a, args.b)]
        runtimes = [Runtime(device, policy, registry, load=False, world=args.tp) for device in devices]
        data = diff_json((args.a, args.b), list(dict.fromkeys(args.model or ends())), runtimes)
    except HalError as error:
        # 1 says that they differ
        print(f"hal: {error}", file=sys.stderr)
        return TROUBLE
    status = DIFFERENT if any(not entry["same"] for entry in (*data["facts"], *data["lines"])) else SAME
    if not args.all:
        data |= {key: [entry for entry in data[key] if not entry["same"]] for key in ("facts", "lines")}
    if args.json:
        print_json(data)
    else:
        _print(data, status)
        print_broken(registry)
    return status


def diff_json(asked: Sequence[str], models: Sequence[str], runtimes: Sequence[Runtime]) -> dict[str, Any]:
    """All facts and lines, the same ones too: schema ``hal.diff/1``."""
    first, second = (runtime.device for runtime in runtimes)
    return {
        "schema": SCHEMA,
        "devices": [
            {"asked": name, "device": device.label, "stack": device.stack}
            for name, device in zip(asked, (first, second), strict=True)
        ],
        "models": list(models),
        "policy": runtimes[0].policy.source,
        "world": runtimes[0].world,
        "facts": [_fact(name, first, second) for name in first],
        "lines": [_line_json(line) for model in models for line in _lines(model, runtimes)],
        "broken": broken_json(runtimes[0].registry),
    }


def _fact(name: str, first: Device, second: Device) -> dict[str, Any]:
    a, b = first[name], second[name]
    return {
        "fact": name,
        "same": _told(a) == _told(b),
        **{side: [fact.value, fact.source, fact.why] for side, fact in (("a", a), ("b", b))},
    }


def _told(fact: Fact) -> tuple[object, bool]:
    """What a requirement sees of a fact: its value, and whether it is lost."""
    return fact.value, fact.source == "failed"


def _lines(model: str, runtimes: Sequence[Runtime]) -> Iterator[Line]:
    first, second = (chosen(model, runtime) for runtime in runtimes)
    alike: dict[Any, list[str]] = {}
    for site, (op, answer) in first.items():
        alike.setdefault((pattern(site), op, _shape(answer), _shape(second[site][1])), []).append(site)
    for at in alike.values():
        op, answer = first[at[0]]
        yield Line(model, tuple(at), op.title(), (answer, second[at[0]][1]))


def _shape(answer: Answer) -> Any:
    return answer.shape() if isinstance(answer, Choice) else None


def _runs(answer: Answer) -> Any:
    """What runs, without why; nothing where the op is refused."""
    return (answer.shape(), _settings(answer)) if isinstance(answer, Choice) else None


def _settings(choice: Choice) -> list[Any]:
    return [
        (plain(dict(piece.settings)), {name: _settings(part) for name, part in piece.parts.items()})
        for piece in choice.pieces
    ]


def _line_json(line: Line) -> dict[str, Any]:
    a, b = line.answers
    return {
        "model": line.model,
        "site": pattern(line.sites[0]) if len(line.sites) > 1 else line.sites[0],
        "sites": list(line.sites),
        "op": line.op,
        "same": line.same,
        "a": _side(a, b),
        "b": _side(b, a),
    }


def _side(answer: Answer, other: Answer) -> dict[str, Any]:
    if not isinstance(answer, Choice):
        return {"op": "", "layouts": {}, "pieces": [], "refused": str(answer), "fell_back": "", "not_here": []}
    more = {"refused": "", "fell_back": answer.fell_back, "not_here": _not_here(answer, other)}
    return _chosen_only(choice_json(answer)) | more


def _chosen_only(data: dict[str, Any]) -> dict[str, Any]:
    """A Choice without the kernels that lost."""
    pieces = [{**p, "parts": {n: _chosen_only(part) for n, part in p["parts"].items()}} for p in data["pieces"]]
    return {**{key: value for key, value in data.items() if key != "candidates"}, "pieces": pieces}


def _not_here(answer: Choice, other: Answer) -> list[dict[str, str]]:
    """What the other device runs for the same op or part and this one does not, each with its reason here."""
    if not isinstance(other, Choice):
        return []
    mine: dict[str, Choice] = dict(answer.walk())
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name, theirs in other.walk():
        ours = mine.get(name)
        if ours is None or type(ours.op) is not type(theirs.op):
            continue
        runs = {piece.kernel.name for piece in ours.pieces}
        for kernel in dict.fromkeys(piece.kernel.name for piece in theirs.pieces):
            if kernel not in runs:
                # both devices have the same registry
                why = next(c for c in ours.candidates if c.kernel == kernel)
                found[name, kernel] = {"part": name, "kernel": kernel, "kind": why.kind, "reason": why.reason}
    return list(found.values())


def _print(data: dict[str, Any], status: int) -> None:
    a, b = names = _names(data["devices"])
    stacks = [f"{name} (stack {device['stack']})" for name, device in zip(names, data["devices"], strict=True)]
    print(f"{' and '.join(stacks)}, policy {data['policy']}, world {data['world']}")
    if status == SAME:
        print("nothing differs")
    if data["facts"]:
        rows = [(f["fact"], *_told_text(f["a"]), *_told_text(f["b"])) for f in data["facts"]]
        print_table(("fact", a, "source", b, "source"), rows)
    for line in data["lines"]:
        many = f" x{len(line['sites'])}" if len(line["sites"]) > 1 else ""
        print(f"\n{line['model']}: {line['site']}{many}: {line['op']}")
        if line["same"]:
            _print_side(line["a"], f"{a} and {b} alike")
        else:
            _print_side(line["a"], a)
            _print_side(line["b"], b)


def _names(devices: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """How the devices are told apart: by labels, or where these are equal by what was asked for."""
    key = "asked" if devices[0]["device"] == devices[1]["device"] else "device"
    return devices[0][key], devices[1][key]


def _told_text(fact: list[Any]) -> tuple[str, str]:
    value, source, why = fact
    return "unknown" if value is None else str(value), f"{source}: {why}" if why else source


def _print_side(side: dict[str, Any], label: str) -> None:
    if side["refused"]:
        print(f"  on {label}: {side['refused']}")
        return
    print(
        f"  on {label}" + (": " + ", ".join(f"{n} {v}" for n, v in side["layouts"].items()) if side["layouts"] else "")
    )
    print_table(("rows", "kernel", "tier", "numerics", "settings", "why"), piece_rows(side), 4)
    for lost in side["not_here"]:
        part = f"{lost['part']}: " if lost["part"] else ""
        print(f"    not {part}{lost['kernel']}: {lost['reason']}")
    if side["fell_back"]:
        print(f"    fell back: {side['fell_back']}")
