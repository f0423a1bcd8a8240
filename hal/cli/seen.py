"""How far the kernels of a choice were seen to run: the rows of evidence files that speak of a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hal.choice import Choice, Piece
from hal.device import Device, load_device
from hal.errors import HalError
from hal.evidence import STRENGTH, Evidence, Row, arch_of, read, strongest

SHOWN = (*STRENGTH, "failed")  # from what says most to what says that it is wrong
COMMITTED = Path(__file__).parents[2] / "ci" / "evidence"


@dataclass(frozen=True)
class Seen:
    """The evidence for one kernel of an op: ``kind`` of ``SHOWN``, the day, on what, how many cases, in which file.

    ``part``: its name in the whole, empty for the whole itself. ``on``: a device, or a profile whose
    facts stood for one. Where nothing was seen, it is only resolved.
    """

    part: str
    op: str
    kernel: str
    kind: str = "resolved"
    date: str = ""
    on: str = ""
    cases: int = 0
    file: str = ""
    why: str = ""


def evidence(files: Iterable[Path] | None) -> dict[str, Evidence]:
    """Evidence by the names of its files; ``None``: of the checkout that this package stands in, if it does.

    Raises HalError for the first that cannot be read.
    """
    if files is not None:
        return {str(file): read(file) for file in files}
    return {f"ci/evidence/{file.name}": read(file) for file in sorted(COMMITTED.glob("*.json"))}


def of_piece(
    choice: Choice, piece: Piece, device: Device, files: Mapping[str, Evidence], part: str = ""
) -> Iterator[Seen]:
    """The best evidence for every kernel that a piece runs, its parts' after its own."""
    yield _best(part, choice.op.title(), piece.kernel.name, device, files)
    for name, inner in piece.parts.items():
        for each in inner.pieces:
            yield from of_piece(inner, each, device, files, f"{part}.{name}" if part else name)


def weakest(found: Iterable[Seen]) -> Seen:
    """What a whole rests on: it is seen no better than the least of its kernels."""
    return max(found, key=lambda seen: SHOWN.index(seen.kind))


def _best(part: str, op: str, kernel: str, device: Device, files: Mapping[str, Evidence]) -> Seen:
    """The strongest kind, the newest of it; a failure that is no older stands before all."""
    found = [
        Seen(part, op, kernel, row.kind, evidence.date, _stood_in(row) or evidence.device, row.cases, name, row.why)
        for name, evidence in files.items()
        for row in evidence.rows
        if (row.op, row.kernel) == (op, kernel) and row.kind in SHOWN and _speaks_of(row, evidence, device)
    ]
    newest = sorted(found, key=lambda seen: seen.date, reverse=True)
    best = strongest(newest) or Seen(part, op, kernel)
    return next((seen for seen in newest if seen.kind == "failed" and seen.date >= best.date), best)


def _stood_in(row: Row) -> str:
    """The profile that stood for a device; what ran did so on the file's device, whatever facts chose it."""
    return "" if row.kind == "ran" else row.on


def _speaks_of(row: Row, evidence: Evidence, device: Device) -> bool:
    """Whether a row tells of a device: of its architecture; an interpreter knows none, and tells of all."""
    profile = _stood_in(row)
    return row.kind == "interpreted" or arch_of(device) == (_of_profile(profile) if profile else evidence.arch)


@cache
def _of_profile(name: str) -> str:
    try:
        return arch_of(load_device(name))
    except HalError:
        return ""
