"""One step's metadata: tensors at fixed addresses, and the same numbers on the host."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from hal.errors import HalError

if TYPE_CHECKING:
    import torch

MODES = ("prefill", "decode", "verify")
LARGEST = 2**31 - 1  # of int32, which the tensors hold


@dataclass(frozen=True)
class Host:
    """What the batch says, as plain numbers: for planning, never read back from the device."""

    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    slots: tuple[int, ...]
    accepted: tuple[int, ...]
    greedy: bool = True

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def kv_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence after this step."""
        return tuple(c + n for c, n in zip(self.contexts, self.lengths, strict=True))


@dataclass(frozen=True)
class Sampling:
    """How one sequence picks its next token. Temperature 0 is greedy; top_k 0 means all."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise HalError(f"temperature is 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise HalError(f"top_p is above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise HalError(f"top_k is 0 (all) or more, and fits 32 bits; got {self.top_k}")

    def uniform(self, position: int) -> float:
        """The number in [0, 1) that decides at this position: the same for any kernel and batch.

        0 where nothing is to decide: making it costs more host time than a small kernel runs.
        """
        if self.temperature == 0:
            return 0.0
        return random.Random(f"{self.seed}:{position}").random()


@dataclass
class Batch:
    """What ops need to know of a step; the last argument of every op that needs it.

    slots ``[sequences]`` int32, negative for padding; cu_seqlens ``[sequences + 1]`` int32;
    contexts and kv_lengths ``[sequences]`` int32, tokens before and after this step;
    positions ``[tokens]`` or ``[3, tokens]`` int64, rotary positions; cells ``[tokens]``
    int64, the KV cell ``page * page_size + offset`` of each token, negative for padding;
    page_table ``[sequences, pages]`` int32; padding ``[tokens]`` bool, tokens of no sequence;
    accepted ``[sequences]`` int32, how many tokens of the last verify step stand and are not in
    the state yet: contexts count them. Sampling: temperature, top_p, uniform float32 and top_k
    int32, each ``[sequences]``; a verify step has a uniform for each of its tokens.
    """

    mode: str
    host: Host
    slots: torch.Tensor
    cu_seqlens: torch.Tensor
    contexts: torch.Tensor
    kv_lengths: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    page_table: torch.Tensor
    padding: torch.Tensor
    accepted: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    uniform: torch.Tensor
    plans: dict[object, object] = field(default_factory=dict)

    def to(self, place: str) -> Batch:
        """A copy whose tensors lie elsewhere, with the same strides and no plans yet."""
        import torch

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place)
            return there.copy_(value)

        tensors = {f.name: moved(getattr(self, f.name)) for f in fields(self) if f.name != "plans"}
        return Batch(**tensors)

    def refresh(self) -> None:
        """Make the host's numbers again from tensors that the device moved on; waits for it."""
        starts, slots, contexts, accepted = (
            tuple(x.tolist()) for x in (self.cu_seqlens, self.slots, self.contexts, self.accepted)
        )
        lengths = tuple(b - a for a, b in pairwise(starts))
        self.host = Host(lengths, contexts, slots, accepted, self.host.greedy)

    def planned(self, key: object) -> Any:
        """What a kernel's plan made of this batch; ``Runtime.begin`` must have run."""
        try:
            return self.plans[key]
        except KeyError:
            raise HalError(f"{key}: its plan did not see this batch; call runtime.begin(batch) each step") from None

    @property
    def may_pad(self) -> bool:
        """Whether a row may be padding. The host knows of a prefill alone: graphs read others' slots."""
        return self.mode != "prefill" or any(slot < 0 for slot in self.host.slots)

    @property
    def sequences(self) -> int:
        return len(self.host.slots)


def _ints(name: str, values: Sequence[Any], least: int = 0, most: int = LARGEST, wanted: str = "") -> None:
    """Raise HalError unless all are ints from ``least`` to ``most``. Where they are, no line runs for each of them."""
    ints = list(map(type, values)).count(int) == len(values)
    if not ints or (len(values) and not least <= min(values) <= max(values) <= most):
        bad = next(v for v in values if type(v) is not int or not least <= v <= most)
        raise HalError(f"batch: {name}: expected {wanted or f'an int from {least} to {most}'}, got {bad!r}")


def _sound(
    mode: str,
    lengths: Sequence[int],
    contexts: Sequence[int],
    slots: Sequence[int],
    pages: Sequence[Sequence[int]],
    page_size: int,
    sampling: Sequence[Sampling],
    accepted: Sequence[int],
) -> None:
    """Raise HalError naming what does not fit."""
    if mode not in MODES:
        raise HalError(f"batch mode is one of {', '.join(MODES)}, got {mode!r}")
    count = len(lengths)
    needed = {"contexts": len(contexts), "slots": len(slots)}
    optional = {"pages": len(pages), "sampling": len(sampling), "accepted": len(accepted)}
    for name, entries in {**needed, **optional}.items():
        if entries != count and (entries or name in needed):
            raise HalError(f"batch: {name} has {entries} entries for {count} sequences")
    if mode == "decode":
        _ints("lengths", lengths, 1, 1, "1 (decode is one token of each)")
    else:
        _ints("lengths", lengths)
    _ints("contexts", contexts)
    _ints("slots", slots, -LARGEST - 1)
    _ints("pages", list(chain.from_iterable(pages)))
    _ints("page_size", (page_size,), 1)
    _ints("accepted", accepted)
    _ints("lengths, all together", (sum(lengths),))
    if mode != "verify" and (waits := [n for n in accepted if n]):
        raise HalError(
            f"batch: accepted: {waits[0]} tokens wait to be taken into the state, which a {mode} step does not do; "
            f"a verify step of no tokens does"
        )
    if over := [pair for pair in zip(accepted, contexts, strict=False) if pair[0] > pair[1]]:
        raise HalError(f"batch: accepted: expected at most the {over[0][1]} tokens before this step, got {over[0][0]}")


def make_batch(
    mode: str,
    lengths: Sequence[int],
    contexts: Sequence[int],
    slots: Sequence[int],
    *,
    pages: Sequence[Sequence[int]] = (),
    page_size: int = 16,
    positions: torch.Tensor | None = None,
    sampling: Sequence[Sampling] = (),
    accepted: Sequence[int] = (),
    device: str = "cpu",
) -> Batch:
    """A batch from plain numbers, one entry per sequence.

    ``lengths``: rows in this step; ``contexts``: tokens before it; ``pages``: KV pages, enough
    for both. Raises HalError naming what does not fit.
    """
    import torch

    _sound(mode, lengths, contexts, slots, pages, page_size, sampling, accepted)
    count = len(lengths)
    greedy = all(s.temperature == 0 for s in sampling)
    host = Host(tuple(lengths), tuple(contexts), tuple(slots), tuple(accepted) or (0,) * count, greedy)
    kv_lengths = host.kv_lengths
    _ints("contexts and lengths together", kv_lengths)
    table = [list(row) for row in pages] or [[] for _ in lengths]
    for length, total, slot, row in zip(lengths, kv_lengths, slots, table, strict=True):
        if pages and slot >= 0 and length and total > len(row) * page_size:
            raise HalError(f"batch: {total} tokens need more than {len(row)} pages of {page_size}")
    picks = list(sampling) or [Sampling()] * count
    most = max((len(row) for row in table), default=0)
    # a buffer, for lists become a tensor several times as slowly
    entries = array("i", [page for row in table for page in (*row, *(-1,) * (most - len(row)))])
    held = torch.frombuffer(entries, dtype=torch.int32) if entries else torch.empty(0, dtype=torch.int32)
    held = held.reshape(count, most)
    # of each token: its sequence, its place there
    counts = torch.tensor(lengths, dtype=torch.int64)
    ends = counts.cumsum(0)
    sequence = torch.arange(count).repeat_interleave(counts)
    place = torch.arange(int(counts.sum())) - (ends - counts - torch.tensor(contexts).long())[sequence]
    padded = (torch.tensor(slots) < 0)[sequence]
    cells = torch.full_like(place, -1)
    if most:
        page = held.long()[sequence, (place // page_size).clamp_(max=most - 1)]
        cells = torch.where(padded, -1, page * page_size + place % page_size)

    def ints(values: Sequence[Any], kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    def floats(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Batch(
        mode=mode,
        host=host,
        slots=ints(slots),
        cu_seqlens=ints([0, *ends.tolist()]),
        contexts=ints(contexts),
        kv_lengths=ints(kv_lengths),
        positions=place.to(device) if positions is None else positions,
        cells=cells.to(device),
        page_table=held.to(device),
        padding=padded.to(device),
        accepted=ints(host.accepted),
        temperature=floats([s.temperature for s in picks]),
        top_p=floats([s.top_p for s in picks]),
        top_k=ints([s.top_k for s in picks]),
        uniform=floats(
            [
                s.uniform(k)
                for s, c, n in zip(picks, contexts, lengths, strict=True)
                for k in (range(c + 1, c + n + 1) if mode == "verify" else (c + n,))
            ]
        ),
    )
