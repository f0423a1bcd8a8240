"""Printing: JSON, lines, and tables that are as wide as they need to be where nobody looks at a terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hal.formats import Quantized, Tensor
from hal.layout import Layout

WIDE = 100_000  # columns of a console that never wraps


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]], indent: int = 0) -> None:
    """A table without lines; a terminal folds long cells, anything else gets them whole."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    terminal = sys.stdout.isatty()
    width = Console().width if terminal else WIDE
    out = io.StringIO()
    # what is printed are names and shapes such as [rows, 48]: nothing of it is markup
    console = Console(
        file=out, width=width, force_terminal=terminal, markup=False, emoji=False, highlight=False, soft_wrap=False
    )
    console.print(Padding(table, (0, 0, 0, indent)))
    print("\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n")))


def plain(value: Any) -> Any:
    """A field of an op as JSON: formats and layouts as text, other dataclasses by their fields."""
    if isinstance(value, (Tensor, Quantized, Layout)):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def settings_text(settings: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())
