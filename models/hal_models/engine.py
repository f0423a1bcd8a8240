"""Runs a model on many sequences: slots and KV pages, prefill in chunks, then one token a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hal.batch import Batch, Sampling, make_batch
from hal.errors import HalError
from hal_models import PAGE_SIZE
from hal_models.captured import Captured, Step, buckets
from hal_models.drafted import Drafted, DraftStep, room

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Request:
    """A prompt, how much to add to it, how to pick, and where to stop (stop tokens are not given)."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Event:
    """A token of a request, or its end: ``token`` is None, ``finish`` says ``stop`` or ``length``."""

    request: int
    token: int | None
    finish: str = ""


@dataclass(eq=False)
class _Sequence:
    index: int
    request: Request
    slot: int
    pages: tuple[int, ...]
    tokens: list[int]
    done: int = 0  # tokens in the state, those pending there too
    ended: bool = False
    drafts: tuple[int, ...] = ()  # for the tokens after the last
    pending: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    @property
    def more(self) -> int:
        """Tokens that it may still be given."""
        return len(self.request.prompt) + self.request.max_tokens - len(self.tokens)


class Engine:
    """A model with its pools. ``slots`` sequences run at once; ``pages`` of 16 tokens hold their keys.

    ``chunk``: rows of a prefill step at most. All memory of a sequence is set aside when it
    starts, so nothing that runs is ever turned away. Decode steps are captured graphs where the
    device and all kernels chosen allow it; ``eager`` says why they are not. A model that drafts verifies
    in each step; ``acceptance`` is how many tokens that gave on average, and ``accept``, for timing, how many
    rows it says stand. Not thread-safe.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 8,
        pages: int = 512,
        chunk: int = 512,
        graphs: bool = True,
        accept: int = 0,
    ) -> None:
        for name, value in (("slots", slots), ("pages", pages), ("chunk", chunk)):
            if value < 1:
                raise HalError(f"engine: {name}: expected 1 or more, got {value}")
        self.model, self.chunk, self.pages = model, chunk, pages
        self.place = model.runtime.place
        self.state = model.new_state(slots, pages)
        self._slots, self._pages = list(range(slots))[::-1], list(range(pages))[::-1]
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[_Sequence] = []
        self._events: deque[Event] = deque()
        self._count = 0
        self._under_way: tuple[list[_Sequence], Step] | None = None
        self._drafting: tuple[list[_Sequence], DraftStep] | None = None
        self.verified = self._gained = 0  # sequences in verify steps, and what they gained
        self.eager = self._why_eager(slots) if graphs else "graphs=False"
        context = min(pages * PAGE_SIZE, model.cfg.max_positions)
        sizes = (model, self.state, slots, context, PAGE_SIZE)
        self.drafted = Drafted(*sizes, graphs=not self.eager, accept=accept) if model.draft else None
        self.captured = None if self.eager or model.draft else Captured(*sizes)

    @property
    def acceptance(self) -> float:
        """Tokens that a sequence gained in a verify step, on average: 1 to drafts + 1; 0 where none was."""
        return self._gained / self.verified if self.verified else 0.0

    def _why_eager(self, slots: int) -> str:
        runtime = self.model.runtime
        if not runtime.can_capture:
            return f"no backend captures graphs on {runtime.device.label}"
        each = range(1, self.model.draft + 2)
        found = [name for rows in buckets(slots) for n in each for name in runtime.uncaptured(rows * n)]
        return f"no graph may hold {found[0]}" if found else ""

    def add(self, request: Request) -> int:
        """Queue a request; gives its number. Errors: HalError for one that can never run."""
        self._check(request)
        self._waiting.append((self._count, request))
        self._count += 1
        return self._count - 1

    def _check(self, request: Request) -> None:
        total = len(request.prompt) + request.max_tokens
        if not request.prompt:
            raise HalError("request: prompt: expected at least one token, got none")
        if request.max_tokens < 1:
            raise HalError(f"request: max_tokens: expected 1 or more, got {request.max_tokens}")
        if bad := [t for t in request.prompt if not 0 <= t < self.model.cfg.vocab]:
            raise HalError(f"request: prompt: expected tokens of 0..{self.model.cfg.vocab - 1}, got {bad[0]}")
        limit = min(self.pages * PAGE_SIZE - room(self.model), self.model.cfg.max_positions)
        if total > limit:
            raise HalError(f"request: {total} tokens in all; the engine holds {limit}")

    def run(self) -> Iterator[Event]:
        """Steps until every request has ended. One that was left early goes on in the next."""
        while self._events or self._waiting or self._running:
            if not self._events:
                self._events.extend(self.step())
                continue
            yield self._events.popleft()

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """The tokens of each request, all at once; requests that were left early end too, unheard."""
        for request in requests:
            self._check(request)
        found: dict[int, list[int]] = {self.add(request): [] for request in requests}
        for event in self.run():
            if event.token is not None and event.request in found:
                found[event.request].append(event.token)
        return list(found.values())

    def step(self) -> list[Event]:
        """Start what can start; then one prefill step while prompts are left, else one decode step."""
        import torch

        self._start()
        with torch.inference_mode():
            fresh = [s for s in self._running if s.left > 1 or s.done == 0]
            return self._prefill(fresh) if fresh else self._decode(self._running)

    def _start(self) -> None:
        while self._waiting and self._slots:
            index, request = self._waiting[0]
            count = pages_of(self.model, request)
            if count > len(self._pages):
                return
            self._waiting.popleft()
            pages = tuple(self._pages.pop() for _ in range(count))
            self._running.append(_Sequence(index, request, self._slots.pop(), pages, list(request.prompt)))

    def _prefill(self, fresh: list[_Sequence]) -> list[Event]:
        lengths, chosen, room = [], [], self.chunk
        for sequence in fresh:
            take = min(sequence.left, room)
            if take:
                lengths.append(take)
                chosen.append(sequence)
                room -= take
        batch = self._batch("prefill", chosen, lengths)
        partial, residual = self._forward(chosen, lengths, batch)
        ends = [i for i, s in enumerate(chosen) if s.left == 0]
        events: list[Event] = []
        if ends:
            last = batch.cu_seqlens[1:].long()[ends] - 1
            finished = [chosen[i] for i in ends]
            picks = self._batch("decode", finished, [1] * len(finished), back=1)
            events = self._pick(finished, partial[last], residual[last], picks)
        if self.drafted is not None:
            self._draft(self.drafted, chosen, lengths, batch, (partial, residual))
        return events

    def _draft(
        self,
        drafted: Drafted,
        chosen: list[_Sequence],
        lengths: list[int],
        batch: Batch,
        pair: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """A prefill step's rows through the draft head, each with the token after it; drafts after whole prompts."""
        import torch

        mtp = self.model.mtp
        hidden, _ = mtp.hidden(*pair)
        # a stop token is none: what comes of the row is for nothing
        ids = [t for s, n in zip(chosen, lengths, strict=True) for t in (*s.tokens, 0)[s.done - n + 1 : s.done + 1]]
        partial, residual = mtp(torch.tensor(ids, device=self.place), hidden, self.state[-1], batch)
        ends = [i for i, s in enumerate(chosen) if s.left == 1 and not s.ended]
        if not ends:
            return
        last, ready = batch.cu_seqlens[1:].long()[ends] - 1, [chosen[i] for i in ends]

        def begin(at: int) -> Batch:
            after = self._batch("decode", ready, [1] * len(ready), back=-at)
            self.model.runtime.begin(after)
            return after

        for sequence, row in zip(ready, drafted.first((partial[last], residual[last]), begin).tolist(), strict=True):
            sequence.drafts = tuple(row)

    def _decode(self, running: list[_Sequence]) -> list[Event]:
        if not running:
            return []
        if self.drafted is not None:
            return self._verify(self.drafted, running)
        if self.captured is not None:
            return self._replay(self.captured, running)
        lengths = [1] * len(running)
        batch = self._batch("decode", running, lengths)
        partial, residual = self._forward(running, lengths, batch)
        return self._pick(list(running), partial, residual, batch)

    def _replay(self, captured: Captured, running: list[_Sequence]) -> list[Event]:
        """One step by graph. The one after it begins before this one's ids are read, where its sequences are sure."""
        if self._under_way is None:
            step = captured.step(
                [s.tokens[-1] for s in running],
                [s.done for s in running],
                [s.slot for s in running],
                [s.pages for s in running],
                [s.request.sampling for s in running],
            )
            self._under_way = (list(running), step)
        sequences, step = self._under_way
        self._under_way = None
        # a stop token may still end one: then its row of the next step is for nothing
        if sequences == running and all(s.more > 1 and s.request.sampling.temperature == 0 for s in running):
            self._under_way = (sequences, captured.again(len(sequences)))
        found = [(s, token) for s, token in zip(sequences, step.read(), strict=True) if not s.ended]
        for sequence, _ in found:
            sequence.done += 1
        events = self._given([s for s, _ in found], [token for _, token in found])
        if self._under_way is not None and all(s.ended for s in sequences):
            self._under_way = None
        return events

    def _verify(self, drafted: Drafted, running: list[_Sequence]) -> list[Event]:
        """One step of drafts. The one after it begins before this one is read, where its sequences are sure."""
        if self._drafting is None:
            step = drafted.step(
                [[s.tokens[-1], *s.drafts] for s in running],
                [s.done for s in running],
                [s.slot for s in running],
                [s.pages for s in running],
                [s.request.sampling for s in running],
                [s.pending for s in running],
            )
            self._drafting = (list(running), step)
        sequences, step = self._drafting
        self._drafting = None
        # a stop token may still end one: then its rows of the next step are for nothing
        sure = all(s.more > drafted.each and s.request.sampling.temperature == 0 for s in running)
        if drafted.graphs and sequences == running and sure:
            self._drafting = (sequences, drafted.again(len(sequences)))
        events: list[Event] = []
        for sequence, gain in zip(sequences, step.read(), strict=True):
            if sequence.ended:
                continue
            self.verified += 1
            self._gained += gain.accepted
            sequence.done += gain.accepted
            sequence.drafts, sequence.pending = tuple(gain.drafts), gain.accepted
            for token in gain.tokens:
                if not sequence.ended:
                    events += self._given([sequence], [token])
        if self._drafting is not None and all(s.ended for s in sequences):
            self._drafting = None
        return events

    def _batch(self, mode: str, sequences: list[_Sequence], lengths: list[int], back: int = 0) -> Batch:
        return make_batch(
            mode,
            lengths,
            [s.done - back for s in sequences],
            [s.slot for s in sequences],
            pages=[s.pages for s in sequences],
            page_size=PAGE_SIZE,
            sampling=[s.request.sampling for s in sequences],
            device=self.place,
        )

    def _forward(
        self, sequences: list[_Sequence], lengths: list[int], batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        ids = [t for s, n in zip(sequences, lengths, strict=True) for t in s.tokens[s.done : s.done + n]]
        self.model.runtime.begin(batch)
        pair: tuple[torch.Tensor, torch.Tensor] = self.model(torch.tensor(ids, device=self.place), self.state, batch)
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.done += length
        return pair

    def _pick(
        self, sequences: list[_Sequence], partial: torch.Tensor, residual: torch.Tensor, batch: Batch
    ) -> list[Event]:
        logits, _ = self.model.head(partial, residual)
        return self._given(sequences, self.model.sample(logits, batch).tolist())

    def _given(self, sequences: list[_Sequence], tokens: list[int]) -> list[Event]:
        events = []
        for sequence, token in zip(sequences, tokens, strict=True):
            request = sequence.request
            if token in request.stops:
                events.append(self._end(sequence, "stop"))
                continue
            sequence.tokens.append(token)
            events.append(Event(sequence.index, token))
            if not sequence.more:
                events.append(self._end(sequence, "length"))
        return events

    def _end(self, sequence: _Sequence, finish: str) -> Event:
        self._running.remove(sequence)
        sequence.ended = True
        self._slots.append(sequence.slot)
        self._pages += sequence.pages
        return Event(sequence.index, None, finish)


def pages_of(model: Any, request: Request) -> int:
    """KV pages that a request takes."""
    return -(-(len(request.prompt) + request.max_tokens + room(model)) // PAGE_SIZE)


def score(model: Any, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits ``[tokens, vocab]`` after every token of each sequence, in one prefill step."""
    import torch

    needed = [-(-len(s) // PAGE_SIZE) for s in sequences]
    starts = [sum(needed[:i]) for i in range(len(needed))]
    with torch.inference_mode():
        batch = make_batch(
            "prefill",
            [len(s) for s in sequences],
            [0] * len(sequences),
            list(range(len(sequences))),
            pages=[list(range(at, at + n)) for at, n in zip(starts, needed, strict=True)],
            page_size=PAGE_SIZE,
            device=model.runtime.place,
        )
        model.runtime.begin(batch)
        state = model.new_state(len(sequences), max(1, sum(needed)))
        ids = torch.tensor([t for s in sequences for t in s], device=model.runtime.place)
        logits, _ = model.head(*model(ids, state, batch))
    return list(logits.split([len(s) for s in sequences]))
