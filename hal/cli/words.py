"""A cell of ``hal.matrix/1`` in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.choice import rows_text

Cell = Mapping[str, Any]


def kernels(cell: Cell) -> list[str]:
    """What runs: a text for each range of rows, without them where there is one."""
    pieces = cell["pieces"]
    if len(pieces) == 1:
        return [pieces[0]["chosen"]]
    return [f"{rows_text(piece['rows'])} {piece['chosen']}" for piece in pieces]


def reasons(cell: Cell) -> list[str]:
    """Why it runs, or why nothing does; what fell back, and where it was decided."""
    whys = dict.fromkeys(piece["why"] for piece in cell["pieces"])
    if len(whys) > 1:
        said = [f"{rows_text(p['rows'])} {p['chosen']}: {p['why']}" for p in cell["pieces"]]
    else:
        said = list(whys)
    fell = f"fell back: {cell['fell_back']}" if cell["fell_back"] else ""
    return [text for text in (*said, cell["refused"], fell, cell["note"]) if text]


# what is compiled is so for the architecture that is asked about
WHERE = {"ran": "on", "emulated": "as", "interpreted": "as", "failed": "on"}


NO_EVIDENCE = "no evidence files: what is shown is resolved only"


def where(found: Mapping[str, Any]) -> str:
    """``on NVIDIA H200``, ``as mi300x``; nothing where the kind says it."""
    return f"{WHERE[found['kind']]} {found['on']}" if found["on"] and found["kind"] in WHERE else ""


def seen(found: Mapping[str, Any]) -> str:
    """``ran 2026-01-31 on NVIDIA H200``, ``compiled 2026-01-31``, ``resolved``."""
    return " ".join(word for word in (found["kind"], found["date"], where(found)) if word)
