"""What was chosen, as lines: ops that are alike are one line, everything that fell back says why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal.choice import Choice

if TYPE_CHECKING:
    from hal.runtime import Runtime

HEADS = ("sites", "op", "kernel", "layouts and formats")
MOVES = ("Quantize", "Copy")


@dataclass(frozen=True)
class Line:
    """Ops at several sites that were decided alike. ``site`` has ``*`` where their numbers stand."""

    site: str
    sites: tuple[str, ...]
    choice: Choice

    @property
    def name(self) -> str:
        """The site, and how many there are."""
        return f"{self.site} x{len(self.sites)}" if len(self.sites) > 1 else self.site

    def cells(self) -> tuple[str, str, str, str]:
        """A row of a table: sites, op, kernels, layouts and formats."""
        extra = "; ".join(text for text in (self.choice.op.quantized(), self.layouts(), self.edges()) if text)
        return self.name, self.choice.op.title(), self.choice.kernels(), extra

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
            site = group.site(member)
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


def device_line(runtime: Runtime) -> str:
    """Device, stack, policy and ranks in a line."""
    device = runtime.device
    return (
        f"device {device.label} ({device.value('vendor')} {device.value('arch')}), stack {device.stack}, "
        f"policy {runtime.policy.source}, world {runtime.world}"
    )


def report(runtime: Runtime) -> str:
    """All choices as text."""
    rows = [HEADS]
    notes = list(runtime.notes)
    for line in lines(runtime):
        rows.append(line.cells())
        notes += [f"converts: {line.name}: {kernel}, {size(each)} a row" for kernel, each in line.moves()]
        if line.choice.fell_back:
            notes.append(f"fell back: {line.name}: {line.choice.fell_back}")
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)) for row in rows]
    lost = [f"backend {b.name} is broken: {b.error}" for b in runtime.registry.broken]
    none = [] if any(n.startswith("fell back") for n in notes) else ["nothing fell back"]
    return "\n".join(row.rstrip() for row in [device_line(runtime), *table, *notes, *lost, *none])
