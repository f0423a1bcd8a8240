"""A picture of what ``hal bench`` measured: for each problem, the time of every kernel over the rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hal.errors import HalError


def by_problem(results: Iterable[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Op and results of each problem, in their order."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault((row["op"], str(row["problem"])), []).append(row)
    return [(op, rows) for (op, _), rows in groups.items()]


def figure() -> type[Any]:
    """What a picture is drawn on. Errors: HalError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HalError(f"--plot draws with matplotlib: {error}") from None
    return Figure  # type: ignore[no-any-return]


def plot(answer: dict[str, Any], to: Path) -> None:
    """Write a PNG."""
    groups = by_problem(row for row in answer["results"] if row["us"] is not None)
    drawn = figure()(figsize=(7, 4.5 * max(1, len(groups))), layout="constrained")
    for index, (op, rows) in enumerate(groups, 1):
        axes = drawn.add_subplot(len(groups), 1, index)
        for kernel in dict.fromkeys(r["kernel"] for r in rows):
            own = sorted((r["rows"], r["us"]) for r in rows if r["kernel"] == kernel)
            axes.plot(*zip(*own, strict=True), marker="o", label=kernel)
        least = sorted({r["rows"]: r["bytes"] / answer["ceiling"] * 1e6 for r in rows}.items())
        axes.plot(*zip(*least, strict=True), color="black", linestyle=":", label="bytes / ceiling")
        axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="microseconds", title=op)
        axes.legend(fontsize="small")
    drawn.savefig(to, dpi=120, format="png")
