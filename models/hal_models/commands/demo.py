"""``hal demo``: the shipped checkpoint on a few task lines, the right answers beside, and the report."""

from __future__ import annotations

import argparse
import json

from hal_models.commands.loading import checkpoint, common, loaded


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("--model", default="tiny-dense", choices=("tiny-dense", "tiny-moe"))
    parser.add_argument("--lines", type=int, default=2, metavar="N", help="lines of each task (2)")
    common(parser)


def run(args: argparse.Namespace) -> int:
    """Answer; exit status 0 whatever the answers are."""
    from hal_models.engine import Engine, Request
    from hal_models.tasks import TASKS, lines

    model = loaded(checkpoint(args.model), args.dtype)
    asked = [line for task in TASKS for line in lines(1, args.lines, task)]
    stops = frozenset((*model.cfg.stops, 10))
    engine = Engine(model, slots=16, pages=256)
    tokens = engine.generate([Request(list(prompt.encode()), 24, stops=stops) for _, prompt, _ in asked])
    rows = [
        {
            "task": task,
            "prompt": prompt,
            "answer": bytes(t for t in ids if t < 256).decode(errors="replace"),
            "right": a,
        }
        for (task, prompt, a), ids in zip(asked, tokens, strict=True)
    ]
    if args.json:
        print(json.dumps({"schema": "hal.demo/1", "lines": rows, "report": model.runtime.report()}))
        return 0
    _table(rows)
    print()
    print(model.runtime.report())
    return 0


def _table(rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("task", "prompt", "the model answers", "right answer", "")
    for row in rows:
        good = row["answer"] == row["right"]
        cells = [escape(row[key]) for key in ("task", "prompt", "answer", "right")]
        table.add_row(*cells, "yes" if good else "no")
    Console(width=max(100, Console().width)).print(table)
