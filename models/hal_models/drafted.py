"""Steps that verify drafted tokens and draft the next: one graph each, where the device captures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hal.batch import Batch, Sampling
from hal.fixed import Behind, FixedBatch
from hal_models.captured import Step, buckets

if TYPE_CHECKING:
    import torch

    Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Gain:
    """What a step gives a sequence: how many rows stand, the tokens after those, and the next drafts."""

    accepted: int
    tokens: list[int]
    drafts: list[int]


@dataclass(frozen=True)
class DraftStep:
    """A step under way; ``read`` waits for it."""

    step: Step
    each: int

    def read(self) -> list[Gain]:
        """What each sequence is given."""
        return [Gain(n, row[:n], row[self.each :]) for n, *row in self.step.read()]


class Drafted:
    """Verify steps over one pool of state, each followed by its drafts.

    A step verifies the last token of each sequence and the model's ``draft`` tokens after it. Its own
    hidden rows go through the draft head, which so writes the keys of accepted positions anew; the
    last accepted row gives the first draft, and the head's own rows the others. Lengths and accepted
    counts stay on the device. ``context``: tokens that a sequence may have at most. ``accept``: for
    timing, how many rows stand whatever they are.
    """

    def __init__(
        self, model: Any, state: Any, slots: int, context: int, page_size: int, graphs: bool, accept: int = 0
    ) -> None:
        self.model, self.state, self.page_size, self.graphs = model, state, page_size, graphs
        self.each, self.accept = model.draft + 1, accept
        self.buckets = buckets(slots)
        self.pages = -(-(context + room(model)) // page_size)
        self._fixed: dict[int, tuple[FixedBatch, Behind]] = {}
        self._graphs: dict[tuple[int, bool], tuple[Callable[[], None], torch.Tensor]] = {}

    def warm(self) -> None:
        """Capture every bucket of greedy steps now, the largest first."""
        for rows in reversed(self.buckets):
            self._replay(rows, True)

    def first(self, pair: Pair, begin: Callable[[int], Batch]) -> torch.Tensor:
        """Drafts ``[rows, draft]`` from the draft head's rows; ``begin(i)`` gives the batch of the i-th after them."""
        import torch

        mtp = self.model.mtp
        logits, hidden = mtp.head(*pair)
        drafts = [mtp.pick(logits)]
        for at in range(self.model.draft - 1):
            logits, hidden = mtp.head(*mtp(drafts[-1], hidden, self.state[-1], begin(at)))
            drafts.append(mtp.pick(logits))
        return torch.stack(drafts, 1)

    def step(
        self,
        ids: Sequence[Sequence[int]],
        contexts: Sequence[int],
        slots: Sequence[int],
        pages: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        accepted: Sequence[int],
    ) -> DraftStep:
        """Begin a step: ``ids`` are each sequence's last token and drafts, ``accepted`` what is pending."""
        rows, greedy = self._bucket(len(ids)), all(s.temperature == 0 for s in sampling)
        if self.graphs:
            self._replay(rows, greedy)
        fixed, _ = self._batches(rows)
        fixed.fill([token for row in ids for token in row], contexts, slots, pages, sampling, accepted)
        return self._begin(len(ids), greedy)

    def again(self, used: int) -> DraftStep:
        """Begin the step after the last, of the same ``used`` sequences, all greedy, with the drafts that it gives."""
        return self._begin(used, True)

    def _begin(self, used: int, greedy: bool) -> DraftStep:
        rows = self._bucket(used)
        if self.graphs:
            replay, found = self._replay(rows, greedy)
            replay()
        else:
            found = self._work(*self._batches(rows), self._settle)
        return DraftStep(Step(found[:used]), self.each)

    def _bucket(self, used: int) -> int:
        return next(b for b in self.buckets if b >= used) if self.graphs else used

    def _batches(self, rows: int) -> tuple[FixedBatch, Behind]:
        if rows not in self._fixed:
            fixed = FixedBatch(rows, self.pages, self.page_size, self.model.runtime.place, self.each)
            fixed.fill([], [], [], [], [])
            self._fixed[rows] = fixed, Behind(fixed)
        return self._fixed[rows]

    def _settle(self, batch: Batch) -> None:
        """For kernels that read the host's numbers: without a graph."""
        batch.refresh()
        self.model.runtime.begin(batch)

    def _work(self, fixed: FixedBatch, behind: Behind, settle: Callable[[Batch], None]) -> torch.Tensor:
        """One step: of each sequence how many rows stand, the tokens picked after its rows, the next drafts."""
        import torch

        model, batch = self.model, fixed.batch
        settle(batch)
        logits, hidden = model.head(*model(fixed.ids, self.state, batch))
        picks, accepted = model.accept(logits, fixed.ids, batch)
        if self.accept:
            accepted = torch.where(batch.slots >= 0, self.accept, 0).int()
        last = batch.cu_seqlens[:-1].long() + (accepted.long() - 1).clamp_(min=0)
        partial, residual = model.mtp(picks, hidden, self.state[-1], batch)
        fixed.follow(accepted)
        behind.start()

        def begin(at: int) -> Batch:
            if at:
                behind.advance()
            settle(behind.batch)
            return behind.batch

        drafts = self.first((partial[last], residual[last]), begin)
        fixed.ids.copy_(torch.cat([picks[last][:, None], drafts], 1).flatten())
        return torch.cat([accepted.long()[:, None], picks.view(-1, self.each), drafts], 1)

    def _replay(self, rows: int, greedy: bool) -> tuple[Callable[[], None], torch.Tensor]:
        if (rows, greedy) not in self._graphs:
            runtime, (fixed, behind) = self.model.runtime, self._batches(rows)
            fixed.fill([], [], [], [], [])
            for batch in (fixed.batch, behind.batch):
                batch.host = replace(batch.host, greedy=greedy)
                runtime.begin(batch)

            def work() -> torch.Tensor:
                return self._work(fixed, behind, lambda batch: None)

            work()  # compiles what is not compiled; all rows are padding, nothing moves
            self._graphs[rows, greedy] = runtime.capture(work)
        return self._graphs[rows, greedy]


def room(model: Any) -> int:
    """Tokens beyond a sequence's last that its pages must hold: verified and drafted for nothing."""
    return 2 * int(model.draft)
