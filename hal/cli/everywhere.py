"""The ops as rows, each with a problem that stands for it, and what serves it on a device that need not be here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hal.choice import Choice
from hal.cli.decisions import AnyOp, alone, sites, sites_alone
from hal.cli.models import build, elsewhere, lost
from hal.errors import HalError
from hal.ops import OPS
from hal.ops.base import Op
from hal.report import pattern
from hal.runtime import Runtime

Answer = Choice | HalError
Asked = tuple[Op[..., Any], Answer]


@dataclass(frozen=True)
class Row:
    """One op and the problem that stands for it. ``whole``: the op's site that ``site`` is a part of, or is itself.

    ``model`` and the sites are empty where the problem is the op's first case.
    """

    op: Op[..., Any]
    source: str
    model: str = ""
    site: str = ""
    pattern: str = ""
    whole: str = ""


@dataclass(frozen=True)
class Cell:
    """What serves a row's problem on a device, or why nothing does; ``note``: where it was decided otherwise."""

    answer: Answer
    note: str = ""


def chosen(model: str, runtime: Runtime) -> dict[str, Asked]:
    """A model's ops and what serves them, by site: decided as one where the device runs it whole, else by group."""
    fresh = runtime.fresh(load=False)
    try:
        build(model, fresh)
    except HalError as error:
        return sites_alone(fresh, elsewhere(model, runtime, failed=error))
    return {site: (choice.op, choice) for site, choice in sites(fresh).items()}


def rows(models: Sequence[str], runtimes: Sequence[Runtime]) -> list[Row]:
    """A row for each op: the problem of the first model that has it, as an op or as a part of one.

    Its parts are those on the shipped CPU profile, else on the first of the devices that composes the op so.
    An op that no model has is represented by its first case.
    """
    found: dict[AnyOp, Row] = {}
    for model in models:
        for built in _built(model, runtimes):
            found = _first(model, built) | found
    return [found.get(op) or _case(op, runtimes[0].world) for op in OPS.values()]


def _built(model: str, runtimes: Sequence[Runtime]) -> Iterator[Runtime]:
    yield elsewhere(model, runtimes[0])
    for runtime in runtimes:
        fresh = runtime.fresh(load=False)
        with suppress(HalError):  # the cells of this device say why
            build(model, fresh)
            yield fresh


def _first(model: str, built: Runtime) -> dict[AnyOp, Row]:
    """For each op that a model has the first problem: one that the model asks for itself, before parts of others."""
    # layers that are alike share their choices
    wholes: dict[int, tuple[str, Choice]] = {}
    for site, choice in sites(built).items():
        wholes.setdefault(id(choice), (site, choice))
    found: dict[AnyOp, Row] = {}
    for site, choice in wholes.values():
        found.setdefault(type(choice.op), Row(choice.op, model, model, site, pattern(site), site))
    for site, whole in wholes.values():
        for name, choice in whole.walk(site):
            found.setdefault(type(choice.op), Row(choice.op, model, model, name, pattern(name), site))
    return found


def _case(op: AnyOp, world: int) -> Row:
    case = op.cases()[0]
    source = f"its first case, {case.name!r}, for no model that was asked has this op{lost()}"
    return Row(replace(case.op, world=world), source)


def cells(rows: Sequence[Row], runtime: Runtime) -> list[Cell]:
    """What serves each row on the runtime's device."""
    found = {model: chosen(model, runtime) for model in dict.fromkeys(row.model for row in rows) if model}
    return [_cell(row, found.get(row.model, {}), runtime) for row in rows]


def _cell(row: Row, found: Mapping[str, Asked], runtime: Runtime) -> Cell:
    if not row.model:
        return Cell(alone(runtime, "case", row.op))
    _, whole = found[row.whole]
    if row.site == row.whole:
        return Cell(whole)
    if isinstance(whole, Choice):
        part = row.site.removeprefix(f"{row.whole}.")
        for name, choice in whole.walk():
            if name == part and type(choice.op) is type(row.op):
                return Cell(choice)
    runs = whole.kernels() if isinstance(whole, Choice) else "nothing"
    note = f"decided by itself: {row.whole}, whose part it is elsewhere, runs {runs}"
    return Cell(alone(runtime, row.site, row.op), note)
