"""A decision as JSON: the schema ``hal.explain/1`` and what ``hal explain`` and ``hal diff`` print from."""

from __future__ import annotations

from typing import Any

from hal.choice import Candidate, Choice, Piece, rows_text
from hal.cli.decisions import Decision
from hal.cli.show import plain, settings_text
from hal.kernel import Rows


def decision_json(decision: Decision, rows: int | None = None) -> dict[str, Any]:
    """One decision; ``rows``: only what serves so many rows."""
    return {
        **choice_json(decision.choice, rows),
        "fell_back": decision.fell_back,
        "problem": plain(decision.choice.op),
        "site": decision.site,
        "sites": list(decision.sites),
        "group": dict(decision.group),
    }


def choice_json(choice: Choice, rows: int | None = None) -> dict[str, Any]:
    """A Choice, its parts inside; parts keep all their pieces, their rows are their own."""
    pieces = choice.pieces if rows is None else (choice.at(rows),)
    candidates = choice.candidates if rows is None else [for_rows(c, pieces[0], rows) for c in choice.candidates]
    return {
        "op": choice.op.title(),
        "layouts": {name: str(layout) for name, layout in choice.layouts.items()},
        "pieces": [_piece(piece, choice) for piece in pieces],
        "candidates": [
            {"kernel": c.kernel, "rows": list(c.rows), "status": c.status, "kind": c.kind, "reason": c.reason}
            for c in candidates
        ],
    }


def _piece(piece: Piece, choice: Choice) -> dict[str, Any]:
    return {
        "rows": list(piece.rows),
        "chosen": piece.kernel.name,
        "settings": plain(dict(piece.settings)),
        "why": piece.why,
        "tier": piece.tier,
        "launches": piece.launches,
        "numerics": str(piece.numerics(choice.op)),
        "parts": {name: choice_json(part) for name, part in piece.parts.items()},
    }


def piece_rows(data: dict[str, Any], indent: str = "") -> list[tuple[str, ...]]:
    """A line for each piece, its parts below it."""
    found: list[tuple[str, ...]] = []
    for piece in data["pieces"]:
        settings = settings_text(piece["settings"])
        name, rows = f"{indent}{piece['chosen']}", f"{indent}{rows_text(piece['rows'])}"
        found.append((rows, name, piece["tier"], piece["numerics"], settings, piece["why"]))
        for part, inner in piece["parts"].items():
            found.append(("", f"{indent}  {part}: {inner['op']}", "", "", "", ""))
            found += piece_rows(inner, indent + "    ")
    return found


def for_rows(candidate: Candidate, piece: Piece, rows: int) -> Candidate:
    """What became of a kernel where only so many rows are asked about."""
    name, chosen = candidate.kernel, piece.kernel.name
    if candidate.status == "refused":
        return candidate
    if name == chosen:
        return Candidate(name, candidate.rows, "chosen")
    if not _takes(candidate.rows, rows):
        return Candidate(name, candidate.rows, "refused", "op", f"takes rows {rows_text(candidate.rows)}, not {rows}")
    own = candidate.reason.partition("; ")[0] or "eligible"
    return Candidate(name, candidate.rows, "outranked", "", f"{own}; {chosen} before it")


def _takes(range_: Rows, rows: int) -> bool:
    # no rows at all belong to the first piece
    return range_[0] <= max(rows, 1) and (range_[1] is None or rows <= range_[1])
