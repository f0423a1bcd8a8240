"""``hal matrix``: ops by devices, the kernel chosen in each cell, why, and how far it was seen to run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from hal.choice import Choice, Piece
from hal.cli import words
from hal.cli.common import add_json, broken_json, filled, need_file, positive, print_broken
from hal.cli.everywhere import Cell, Row, cells, rows
from hal.cli.models import ends
from hal.cli.ops import contract
from hal.cli.page import page
from hal.cli.seen import Seen, evidence, of_piece, weakest
from hal.cli.show import plain, print_json, print_table
from hal.device import Device, load_device, profiles
from hal.errors import HalError
from hal.evidence import Evidence
from hal.policy import Policy
from hal.registry import Registry
from hal.runtime import Runtime

SCHEMA = "hal.matrix/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", type=filled, nargs="+", action="extend", metavar="PROFILE|FILE",
        help="the columns; default: every shipped profile",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=filled, nargs="+", action="extend", metavar="NAME|FOLDER",
        help="an op's problem is that of the first of these that has it; default: as hal explain takes it",
    )  # fmt: skip
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="ranks of tensor parallelism")
    parser.add_argument(
        "--evidence", type=Path, nargs="+", action="extend", metavar="FILE",
        help="hal.evidence/1 files; default: those of the checkout that hal runs from",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page too")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    need_file("--html", args.html)
    devices = _devices(args.device)
    files = evidence(args.evidence)
    registry = Registry.installed()
    # what falls back is shown in its cell, under strict too
    policy = replace(Policy.from_environment(), strict=False)
    runtimes = [Runtime(device, policy, registry, load=False, world=args.tp) for device in devices]
    models = list(dict.fromkeys(args.model or ends()))
    data = matrix_json(models, runtimes, files)
    if args.html:
        text = page(data)
        try:
            args.html.write_text(text, encoding="utf-8")
        except OSError as error:
            raise HalError(f"--html {args.html}: cannot be written: {error.strerror}") from None
    if args.json:
        print_json(data)
    else:
        _print(data)
        print_broken(registry)
    return 0


def _devices(names: Sequence[str] | None) -> list[Device]:
    """The columns in the order asked for; else all profiles, those alike beside each other."""
    if names is not None:
        found = [load_device(name) for name in dict.fromkeys(names)]
    else:
        found = sorted(map(load_device, profiles()), key=_likeness)
    labels = [device.label for device in found]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise HalError(f"--device: two devices are called {twice[0]!r}; hal diff compares such")
    return found


def _likeness(device: Device) -> tuple[str, list[int], str]:
    """Vendor, the numbers of the architecture, label."""
    return device.value("vendor"), [int(n) for n in re.findall(r"\d+", device.value("arch"))], device.label


def matrix_json(models: Sequence[str], runtimes: Sequence[Runtime], files: Mapping[str, Evidence]) -> dict[str, Any]:
    """The whole matrix: schema ``hal.matrix/1``."""
    found = rows(models, runtimes)
    columns = [(runtime.device, cells(found, runtime)) for runtime in runtimes]
    return {
        "schema": SCHEMA,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "models": list(models),
        "policy": runtimes[0].policy.source,
        "world": runtimes[0].world,
        "devices": [
            {"device": d.label, **{key: d.value(key) for key in ("name", "vendor", "arch")}, "stack": d.stack}
            for d, _ in columns
        ],
        "evidence": [
            {"file": name, "device": e.device, "arch": e.arch, "date": e.date, "stack": dict(e.stack), "note": e.note}
            for name, e in files.items()
        ],
        "ops": [_row(row, [(d, column[i]) for d, column in columns], files) for i, row in enumerate(found)],
        "broken": broken_json(runtimes[0].registry),
    }  # fmt: skip


def _row(row: Row, found: Sequence[tuple[Device, Cell]], files: Mapping[str, Evidence]) -> dict[str, Any]:
    return {
        "op": row.op.title(),
        "coarse": row.op.coarse,
        "contract": contract(type(row.op)).splitlines()[0].replace("``", ""),
        "model": row.source,
        "site": row.pattern,
        "problem": plain(row.op),
        "text": str(row.op),
        "cells": [_cell(row, device, cell, files) for device, cell in found],
    }


def _cell(row: Row, device: Device, cell: Cell, files: Mapping[str, Evidence]) -> dict[str, Any]:
    common: dict[str, Any] = {"device": device.label, "note": cell.note}
    choice = cell.answer
    if not isinstance(choice, Choice):
        none: dict[str, Any] = {"pieces": [], "layouts": {}, "fell_back": "", "other_problem": "", "evidence": None}
        return {**common, "refused": str(choice), **none}
    seen = [list(of_piece(choice, piece, device, files)) for piece in choice.pieces]
    return {
        **common,
        "refused": "",
        "pieces": [_piece(piece, found) for piece, found in zip(choice.pieces, seen, strict=True)],
        "layouts": {name: str(layout) for name, layout in choice.layouts.items()},
        "fell_back": choice.fell_back,
        "other_problem": "" if choice.op == row.op else str(choice.op),
        "evidence": asdict(weakest(chain(*seen))),
    }


def _piece(piece: Piece, seen: Sequence[Seen]) -> dict[str, Any]:
    return {
        "rows": list(piece.rows),
        "chosen": piece.kernel.name,
        "settings": plain(dict(piece.settings)),
        "why": piece.why,
        "evidence": asdict(weakest(seen)),
        "kernels": [asdict(each) for each in seen],
    }


def _print(data: dict[str, Any]) -> None:
    print(f"{len(data['ops'])} ops on {len(data['devices'])} devices, {data['date']}, policy {data['policy']}")
    lines = [line for row in data["ops"] for line in _lines(row)]
    print_table(("op", "problem of", "devices", "kernel", "evidence", "why"), lines)
    for file in data["evidence"]:
        print(f"evidence: {file['file']}: {file['device']} ({file['arch']}), {file['date']}")
    if not data["evidence"]:
        print(words.NO_EVIDENCE)


def _lines(row: dict[str, Any]) -> list[tuple[str, ...]]:
    """An op's outcomes, the devices that have the same one together."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for cell in row["cells"]:
        runs = ", ".join(words.kernels(cell)) or "refused"
        evidence = ", ".join(dict.fromkeys(words.seen(piece["evidence"]) for piece in cell["pieces"]))
        alike.setdefault((runs, evidence, "; ".join(words.reasons(cell)).splitlines()[0]), []).append(cell["device"])
    first = (row["op"], row["model"].partition(",")[0])
    return [
        (*(first if i == 0 else ("", "")), " ".join(devices), *outcome)
        for i, (outcome, devices) in enumerate(alike.items())
    ]
