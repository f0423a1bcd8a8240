"""The outcome of resolving: what runs, why, and why nothing else does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from hal.formats import Quantized
from hal.kernel import TIERS, Kernel, Rows, Tier
from hal.layout import Layout
from hal.numerics import Numerics
from hal.ops.base import Op


@dataclass(frozen=True)
class Candidate:
    """One kernel, or one backend that failed to import, and what became of it."""

    kernel: str
    rows: Rows
    status: Literal["chosen", "outranked", "refused"]
    kind: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Piece:
    """What runs for a range of rows."""

    rows: Rows
    kernel: Kernel[Any]
    settings: Mapping[str, Any]
    why: str
    parts: Mapping[str, Choice] = field(default_factory=dict)

    @cached_property
    def tier(self) -> Tier:
        """The kernel's tier, or a worse one of a part: a composed kernel is no better than its parts."""
        tiers = [self.kernel.tier, *(piece.tier for part in self.parts.values() for piece in part.pieces)]
        return max(tiers, key=TIERS.index)

    @cached_property
    def launches(self) -> int:
        """Launches of its own and of its parts, at the most."""
        return self.kernel.launches + sum(max(p.launches for p in part.pieces) for part in self.parts.values())

    @cached_property
    def captures(self) -> bool:
        """Whether a graph may hold it and all its parts."""
        return self.kernel.captures and all(p.captures for part in self.parts.values() for p in part.pieces)

    def numerics(self, op: Op[..., Any]) -> Numerics:
        """The loosest of its own and its parts', whose results are rounded on the way."""
        found = self.kernel.numerics(op)
        # what the last part of a purely composed kernel gives is the result itself
        between = len(self.parts) - (self.kernel.tier == "composed" and bool(self.parts))
        found = replace(found, roundings=found.roundings + between)
        for part in self.parts.values():
            found = replace(found, narrow=found.narrow + _narrow(op, part.op))
            for piece in part.pieces:
                found = found.loosened(piece.numerics(part.op))
        return found


@dataclass(frozen=True)
class Choice:
    """For each range of rows the kernel, and every other kernel with its reason.

    ``op`` is the problem with its edges agreed on; ``layouts`` say how each memory lies;
    ``fell_back`` is empty, or what would run if all software were there.
    """

    op: Op[..., Any]
    layouts: Mapping[str, Layout]
    pieces: tuple[Piece, ...]
    candidates: tuple[Candidate, ...]
    fell_back: str = ""

    def at(self, rows: int) -> Piece:
        """The piece that serves so many rows; no rows belong to the first."""
        for piece in self.pieces:
            if piece.rows[1] is None or rows <= piece.rows[1]:
                return piece
        raise AssertionError("pieces cover all rows")

    def why_not(self, kernel: str, rows: int) -> str:
        """Why this kernel does not serve so many rows; nothing where it does."""
        if self.at(rows).kernel.name == kernel:
            return ""
        reason = next((c.reason for c in self.candidates if c.kernel == kernel), "")
        return reason or f"takes other rows than {rows}"

    def kernels(self) -> str:
        """``torch.separate``, or ``1..1024 torch.padded, 1025.. torch.separate``."""
        if len(self.pieces) == 1:
            return self.pieces[0].kernel.name
        return ", ".join(f"{rows_text(p.rows)} {p.kernel.name}" for p in self.pieces)

    def shape(self) -> tuple[Any, ...]:
        """What was chosen, comparable and printable: kernels, formats, layouts, parts."""
        return (
            self.op.title(),
            str(getattr(self.op, "x", "")),
            str(getattr(self.op, "out", "")),
            tuple(sorted((name, str(layout)) for name, layout in self.layouts.items())),
            tuple(
                (piece.rows, piece.kernel.name, tuple((n, c.shape()) for n, c in piece.parts.items()))
                for piece in self.pieces
            ),
        )

    def walk(self, name: str = "") -> Iterator[tuple[str, Choice]]:
        """This choice and those of its parts, with dotted names."""
        yield name, self
        for piece in self.pieces:
            for part, choice in piece.parts.items():
                yield from choice.walk(f"{name}.{part}" if name else part)


def _narrow(whole: Op[..., Any], part: Op[..., Any]) -> tuple[str, ...]:
    """The element types that a part encodes to, where that is not what the whole gives."""
    out, own = getattr(part, "out", None), getattr(whole, "out", None)
    forms = out if isinstance(out, tuple) else (out,)
    wanted = own if isinstance(own, tuple) else (own,)
    return tuple(form.value for form in forms if isinstance(form, Quantized) and form not in wanted)


def rows_text(rows: Rows) -> str:
    """``1..1024`` or ``1025..``."""
    least, most = rows
    return f"{least}.." if most is None else f"{least}..{most}"
