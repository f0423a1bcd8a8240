"""What was chosen, as lines: ops that are alike are one line, everything that fell back says why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal.choice import Choice, rows_text

if TYPE_CHECKING:
    from hal.runtime import Runtime

MOVES = ("Quantize", "Copy")


@dataclass(frozen=True)
class Line:
    """Ops at several sites that were decided alike. ``site`` has ``*`` where their numbers stand."""

    site: str
    sites: tuple[str, ...]
    choice: Choice

    def kernels(self) -> str:
        """``torch.separate`` or ``1..1024 torch.padded, 1025.. torch.separate``."""
        pieces = self.choice.pieces
        if len(pieces) == 1:
            return pieces[0].kernel.name
        return ", ".join(f"{rows_text(p.rows)} {p.kernel.name}" for p in pieces)

    def layouts(self) -> str:
        """Memories that lie in another layout than the plainest, and all states."""
        return ", ".join(f"{n} {v}" for n, v in sorted(self.choice.layouts.items()) if str(v) != "packed")

    def edges(self) -> str:
        """Formats of a quantized input or output."""
        found = [(side, getattr(self.choice.op, side, None)) for side in ("x", "out")]
        return ", ".join(f"{side} {form}" for side, form in found if hasattr(form, "scale"))

    def moves(self) -> Iterator[tuple[str, int]]:
        """Parts that only move or encode: their kernel, and bytes that each row costs."""
        for _, choice in self.choice.walk():
            if choice.op.title() in MOVES:
                each = choice.op.traffic(2).bytes - choice.op.traffic(1).bytes
                yield choice.pieces[0].kernel.name, each


def pattern(site: str) -> str:
    """A site with ``*`` where its number stands."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", site)


def lines(runtime: Runtime) -> list[Line]:
    """One line for each kind of site, in the order of binding."""
    found: dict[Any, list[str]] = {}
    choices: dict[Any, Choice] = {}
    for group in runtime.groups:
        for member, choice in group.choices.items():
            site = group.name if member == "op" else f"{group.name}.{member}"
            key = (pattern(site), choice.op, choice.shape(), choice.fell_back)
            found.setdefault(key, []).append(site)
            choices.setdefault(key, choice)
    return [Line(key[0] if len(at) > 1 else at[0], tuple(at), choices[key]) for key, at in found.items()]


def size(count: float) -> str:
    """Bytes for people: ``1.5 GB`` is 1.5e9."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def report(runtime: Runtime) -> str:
    """All choices as text."""
    device, policy = runtime.device, runtime.policy
    rows = [("sites", "op", "kernel", "layouts and formats")]
    notes = []
    for line in lines(runtime):
        name = f"{line.site} x{len(line.sites)}" if len(line.sites) > 1 else line.site
        extra = "; ".join(text for text in (line.layouts(), line.edges()) if text)
        rows.append((name, line.choice.op.title(), line.kernels(), extra))
        notes += [f"converts: {name}: {kernel}, {size(each)} a row" for kernel, each in line.moves()]
        if line.choice.fell_back:
            notes.append(f"fell back: {name}: {line.choice.fell_back}")
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)) for row in rows]
    head = [
        f"device {device.label} ({device.value('vendor')} {device.value('arch')}), stack {device.stack}, "
        f"policy {policy.source}, world {runtime.world}"
    ]
    lost = [f"backend {b.name} is broken: {b.error}" for b in runtime.registry.broken]
    none = [] if any(n.startswith("fell back") for n in notes) else ["nothing fell back"]
    return "\n".join(row.rstrip() for row in [*head, *table, *notes, *lost, *none])
