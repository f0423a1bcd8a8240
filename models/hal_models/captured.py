"""The decode step as captured graphs, one for each number of rows; what is left over is padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.batch import Sampling, make_batch
from hal.fixed import FixedBatch

if TYPE_CHECKING:
    import torch

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def buckets(slots: int) -> list[int]:
    """Numbers of rows that graphs are captured for, up to ``slots``."""
    return [b for b in BUCKETS if b < slots] + [slots]


class Captured:
    """Decode steps over one pool of state. Addresses are frozen once a bucket is captured.

    ``context``: tokens that a sequence may have at most. One copy of the weights serves all graphs.
    """

    def __init__(self, model: Any, state: Any, slots: int, context: int, page_size: int) -> None:
        self.model, self.state, self.page_size = model, state, page_size
        self.buckets = buckets(slots)
        self.pages = -(-context // page_size)
        self._graphs: dict[int, tuple[FixedBatch, Callable[[], None], torch.Tensor, torch.Tensor]] = {}

    def warm(self) -> None:
        """Capture every bucket now, the largest first, so that graphs share its memory."""
        for rows in reversed(self.buckets):
            self._graph(rows)

    def step(
        self,
        ids: Sequence[int],
        contexts: Sequence[int],
        slots: Sequence[int],
        pages: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
    ) -> list[int]:
        """The next token of each sequence; reading them is the only wait."""
        used = len(ids)
        fixed, replay, logits, tokens = self._graph(next(b for b in self.buckets if b >= used))
        fixed.fill(ids, contexts, slots, pages, sampling)
        replay()
        if not fixed.batch.host.greedy:
            place = self.model.runtime.place
            picks = make_batch("decode", [1] * used, contexts, slots, sampling=sampling, device=place)
            return list(self.model.sample(logits[:used], picks).tolist())
        return list(tokens[:used].tolist())

    def _graph(self, rows: int) -> tuple[FixedBatch, Callable[[], None], torch.Tensor, torch.Tensor]:
        if rows not in self._graphs:
            runtime = self.model.runtime
            fixed = FixedBatch(rows, self.pages, self.page_size, runtime.place)
            fixed.fill([], [], [], [], [])
            runtime.begin(fixed.batch)

            def work() -> tuple[torch.Tensor, torch.Tensor]:
                logits, _ = self.model.head(*self.model(fixed.ids, self.state, fixed.batch))
                return logits, self.model.sample(logits, fixed.batch)

            work()  # compiles what is not compiled; all rows are padding, nothing moves
            replay, (logits, tokens) = runtime.capture(work)
            self._graphs[rows] = (fixed, replay, logits, tokens)
        return self._graphs[rows]
