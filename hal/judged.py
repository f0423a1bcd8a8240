"""Kernels that were judged for one op: what each could run, and which of them serve which rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hal.choice import Candidate, Piece
from hal.kernel import Kernel, Rows
from hal.ops.base import Op
from hal.requirement import Reason

AnyOp = Op[..., Any]
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Judged:
    """One kernel under one set of layouts: its reason, or the piece it could run."""

    kernel: Kernel[Any]
    rows: Rows
    reason: Reason | None = None
    piece: Piece | None = None
    key: Key = ()

    def covers(self, row: int) -> bool:
        return self.reason is None and self.rows[0] <= row and (self.rows[1] is None or row <= self.rows[1])


def runs(piece: Piece, op: AnyOp, kernel: str | None) -> bool:
    """Whether a kernel runs for an op, by itself or as the part of the same op in a composed one."""
    inner = [c for c in piece.parts.values() if c.op.title() == op.title()]
    return piece.kernel.name == kernel or any(runs(p, c.op, kernel) for c in inner for p in c.pieces)


def cover(judged: Sequence[Judged]) -> Iterator[tuple[Rows, Judged]]:
    """The best kernel for each range of rows from 1 on; nothing where a row has none."""
    eligible = [j for j in judged if j.reason is None]
    starts = sorted({1, *(j.rows[0] for j in eligible), *(j.rows[1] + 1 for j in eligible if j.rows[1] is not None)})
    found: list[tuple[int, Judged]] = []
    for start in starts:
        able = [j for j in eligible if j.covers(start)]
        if not able:
            return
        best = min(able, key=lambda j: j.key)
        if not found or found[-1][1] is not best:
            found.append((start, best))
    for index, (start, best) in enumerate(found):
        yield (start, found[index + 1][0] - 1 if index + 1 < len(found) else None), best


def candidate(judged: Judged, chosen: Sequence[tuple[Rows, Judged]]) -> Candidate:
    """What a choice says of a kernel: chosen, outranked by which, or refused and why."""
    name = judged.kernel.name
    if judged.reason:
        return Candidate(name, judged.rows, "refused", judged.reason.kind, judged.reason.text)
    if judged.piece is None or any(j is judged for _, j in chosen):
        return Candidate(name, judged.rows, "chosen")
    piece = judged.piece
    first = [j.kernel.name for rows, j in chosen if _overlap(rows, judged.rows)]
    return Candidate(
        name,
        judged.rows,
        "outranked",
        "",
        f"tier {piece.tier}, {piece.launches} launches; {' and '.join(first)} before it",
    )


def _overlap(a: Rows, b: Rows) -> bool:
    return (b[1] is None or a[0] <= b[1]) and (a[1] is None or b[0] <= a[1])
