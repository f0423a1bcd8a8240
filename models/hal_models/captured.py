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


class Step:
    """A step under way. ``read`` waits for it, the only wait there is."""

    def __init__(self, tokens: torch.Tensor) -> None:
        import torch

        self._event = None
        if tokens.device.type == "cpu":
            self._tokens = tokens.clone()
            return
        # the next step writes the tokens of this one
        self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._tokens.copy_(tokens, non_blocking=True)
        self._event = torch.Event(tokens.device)
        self._event.record()

    def read(self) -> list[Any]:
        """The next token of each sequence, or the row that says what it is given."""
        if self._event is not None:
            self._event.synchronize()
        return list(self._tokens.tolist())


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
    ) -> Step:
        """Begin a step of these sequences. Errors: HalError for what does not fit, before anything moves."""
        used = len(ids)
        fixed, replay, logits, tokens = self._graph(self._bucket(used))
        fixed.fill(ids, contexts, slots, pages, sampling)
        replay()
        if not fixed.batch.host.greedy:
            place = self.model.runtime.place
            picks = make_batch("decode", [1] * used, contexts, slots, sampling=sampling, device=place)
            return Step(self.model.sample(logits[:used], picks))
        return Step(tokens[:used])

    def again(self, used: int) -> Step:
        """Begin the step after the last, of the same ``used`` sequences, all greedy, with the ids that it gives."""
        _, replay, _, tokens = self._graph(self._bucket(used))
        replay()
        return Step(tokens[:used])

    def _bucket(self, used: int) -> int:
        return next(b for b in self.buckets if b >= used)

    def _graph(self, rows: int) -> tuple[FixedBatch, Callable[[], None], torch.Tensor, torch.Tensor]:
        if rows not in self._graphs:
            runtime = self.model.runtime
            fixed = FixedBatch(rows, self.pages, self.page_size, runtime.place)
            fixed.fill([], [], [], [], [])
            runtime.begin(fixed.batch)

            def work() -> tuple[torch.Tensor, torch.Tensor]:
                logits, _ = self.model.head(*self.model(fixed.ids, self.state, fixed.batch))
                tokens = self.model.sample(logits, fixed.batch)
                fixed.advance(tokens)
                return logits, tokens

            work()  # compiles what is not compiled; all rows are padding, nothing moves
            replay, (logits, tokens) = runtime.capture(work)
            self._graphs[rows] = (fixed, replay, logits, tokens)
        return self._graphs[rows]
