"""Tokens of all 1000 lines with drafts: ``python tests/every_line.py CHECKPOINT [DRAFTS [BATCH]]``, on the device here.

Prints for each number of drafts and each batch how many lines differ from the reference's, and the acceptance length.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from hal_models.commands.loading import SHIPPED, loaded
from hal_models.engine import Engine, Request
from hal_models.qwen3_5.model import Qwen35
from hal_models.tasks import lines


def differing(name: str, model: Qwen35, batch: int) -> tuple[list[int], Engine]:
    """Numbers of the lines that are not answered as the reference does, and the engine that answered."""
    theirs = json.loads((Path(__file__).parent / f"answers-{name}.json").read_text())["lines"]
    engine = Engine(model, slots=batch, pages=16 * batch, chunk=2048)
    requests = [Request(p.encode(), len(a) + 8, stops=frozenset((10, 256))) for _, p, a in lines(7, 1000)]
    texts = [bytes(t for t in ids if t < 256).decode(errors="replace") for ids in engine.generate(requests)]
    return [i for i, (text, line) in enumerate(zip(texts, theirs, strict=True)) if text != line["text"]], engine


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    drafts = [int(numbers[0])] if numbers else list(range(1, 8))
    for draft in drafts:
        built = loaded(SHIPPED / name, "float32", draft)
        for batch in [int(numbers[1])] if numbers[1:] else [1, 16]:
            start = time.perf_counter()
            wrong, engine = differing(name, built, batch)
            text = f"{len(wrong)} lines differ{wrong[:9] or ''}, acceptance length {engine.acceptance:.3f}"
            text += f", {time.perf_counter() - start:.1f} s"
            print(f"{name}, {draft} drafts, batch {batch}: {text}", flush=True)
