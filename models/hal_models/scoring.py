"""How right a byte-level checkpoint is on lines that have one right answer each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hal_models.engine import score


@dataclass(frozen=True)
class Score:
    """Lines answered exactly (teacher-forced, newline included), and the likelihood of their bytes."""

    lines: int
    exact: int
    bytes: int
    nll: float  # summed over answer bytes, natural logarithm

    @property
    def accuracy(self) -> float:
        return self.exact / self.lines

    @property
    def nll_per_byte(self) -> float:
        return self.nll / self.bytes


def scored(model: Any, lines: Sequence[tuple[str, str, str]], together: int = 50) -> Score:
    """Score (task, prompt, answer) lines, ``together`` sequences a step, in order of length."""
    import torch

    exact = count = 0
    nll = 0.0
    pairs = sorted(((p.encode(), a.encode() + b"\n") for _, p, a in lines), key=lambda pair: len(pair[0] + pair[1]))
    for start in range(0, len(pairs), together):
        some = pairs[start : start + together]
        for (prompt, answer), logits in zip(some, score(model, [p + a for p, a in some]), strict=True):
            rows, wanted = logits[len(prompt) - 1 : -1], torch.tensor(list(answer), device=logits.device)
            exact += bool((rows.argmax(-1) == wanted).all())
            nll -= float(rows.double().log_softmax(-1).gather(1, wanted[:, None]).sum())
            count += len(answer)
    return Score(len(pairs), exact, count, nll)
