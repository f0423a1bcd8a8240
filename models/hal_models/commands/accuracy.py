"""``hal accuracy CHECKPOINT``: exact answers and likelihood on the tiny checkpoints' tasks."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from hal.errors import HalError
from hal_models.commands.loading import Bar, checkpoint, common, loaded

if TYPE_CHECKING:
    from hal_models.qwen3_5.model import Qwen35
    from hal_models.scoring import Score

TOGETHER = 50  # lines scored in a step


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("checkpoint", help="a folder, or tiny-dense, tiny-moe")
    parser.add_argument("--lines", type=int, default=1000, metavar="N", help="how many lines (1000)")
    parser.add_argument("--seed", type=int, default=7, help="which lines (7)")
    parser.add_argument("--least", type=float, metavar="SHARE", help="fail below this share of exact answers")
    common(parser)


def run(args: argparse.Namespace) -> int:
    """Score; exit status 1 below ``--least``."""
    from hal_models.tasks import lines
    from hal_models.text import BYTE_VOCAB

    if args.lines < 1:
        raise HalError(f"accuracy: --lines: expected 1 or more, got {args.lines}")
    model = loaded(checkpoint(args.checkpoint), args.dtype)
    if model.cfg.vocab > BYTE_VOCAB:
        raise HalError(f"accuracy: the tasks are written in bytes; {args.checkpoint} has {model.cfg.vocab} tokens")
    start = time.perf_counter()
    found = _scored(model, lines(args.seed, args.lines))
    seconds = time.perf_counter() - start
    if model.runtime.rank == 0:
        if args.json:
            row = {
                "schema": "hal.accuracy/1",
                "checkpoint": args.checkpoint,
                "dtype": model.cfg.dtype,
                "device": model.runtime.device.label,
                "lines": found.lines,
                "exact": found.exact,
                "accuracy": found.accuracy,
                "bytes": found.bytes,
                "nll_per_byte": found.nll_per_byte,
                "choices": model.runtime.digest(),
            }
            print(json.dumps(row))
        else:
            print(f"{found.exact} of {found.lines} answers exact ({found.accuracy:.3f})")
            print(f"{found.nll_per_byte:.6f} nats per answer byte, over {found.bytes} bytes")
            print(f"{model.cfg.dtype} on {model.runtime.device.value('name')}, {seconds:.1f} s")
    return int(args.least is not None and found.accuracy < args.least)


def _scored(model: Qwen35, lines: list[tuple[str, str, str]]) -> Score:
    """The score of all lines, step by step in order of length, with a bar on a terminal."""
    from hal_models.scoring import Score, scored

    ordered = sorted(lines, key=lambda line: len(line[1].encode() + line[2].encode()))
    exact = count = 0
    nll = 0.0
    with Bar("scoring") as bar:
        for start in range(0, len(ordered), TOGETHER):
            some = scored(model, ordered[start : start + TOGETHER], TOGETHER)
            exact, count, nll = exact + some.exact, count + some.bytes, nll + some.nll
            if bar:
                bar(start + some.lines, len(ordered), "scoring")
    return Score(len(ordered), exact, count, nll)
