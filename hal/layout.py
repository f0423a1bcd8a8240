"""How memory lies, for parameters and for state alike.

A layout says as what its memory can be *read*: what is padded can be read as packed,
what is packed as separate, by views of rows; a longer ring as a shorter one. A backend
adds a layout by subclassing; the resolver knows only ``reads_as``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Param:
    """One part of an op's parameters, with this rank's sizes.

    ``shard`` is the axis that ranks split (``None``: every rank has all of it), each of its
    ``sections`` for itself; ``copies`` ranks in a row hold the same slice. ``init`` is
    (mean, deviation) of made-up values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    memory: str = "weight"
    shard: int | None = None
    sections: tuple[int, ...] = ()
    copies: int = 1
    init: tuple[float, float] = (0.0, 1.0)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return prod(self.shape[1:])


@dataclass(frozen=True)
class State:
    """What one slot (a sequence, or a page of tokens) keeps between steps, in canonical order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    canonical: StateLayout


@dataclass(frozen=True)
class Layout:
    """Base of all layouts; frozen and hashable, for it is part of a choice."""

    label: ClassVar[str] = "layout"

    def __str__(self) -> str:
        return self.label

    def reads_as(self, wanted: Layout) -> bool:
        """Whether memory in this layout can be read as ``wanted`` without a copy."""
        return self == wanted


class ParamLayout(Layout):
    """A layout of parameters: which buffers it allocates, and where each part lies in them."""

    def buffers(self, parts: Sequence[Param]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name, shape and dtype of each buffer; pure, so a plan can count bytes."""
        return {p.name: (p.shape, p.dtype) for p in parts}

    def views(self, buffers: Mapping[str, torch.Tensor], parts: Sequence[Param]) -> dict[str, torch.Tensor]:
        """The memory of each part, as views."""
        return dict(buffers)

    def seal(self, buffers: Mapping[str, torch.Tensor], parts: Sequence[Param]) -> None:
        """Runs once all parts are put: shuffle or convert in place, a tensor at a time."""


@dataclass(frozen=True)
class Separate(ParamLayout):
    """Each part in a buffer of its own."""

    label: ClassVar[str] = "separate"


@dataclass(frozen=True)
class Padded(ParamLayout):
    """All parts in one buffer, row after row, then rows of zeros up to a multiple of ``multiple``."""

    multiple: int
    label: ClassVar[str] = "padded"

    def __str__(self) -> str:
        return f"padded:{self.multiple}"

    def reads_as(self, wanted: Layout) -> bool:
        if isinstance(wanted, Padded):
            return self.multiple % wanted.multiple == 0
        return isinstance(wanted, (Packed, Separate))

    def buffers(self, parts: Sequence[Param]) -> dict[str, tuple[tuple[int, ...], str]]:
        rows = sum(p.rows for p in parts)
        padded = -(-rows // self.multiple) * self.multiple
        return {"packed": ((padded, *parts[0].shape[1:]), parts[0].dtype)}

    def views(self, buffers: Mapping[str, torch.Tensor], parts: Sequence[Param]) -> dict[str, torch.Tensor]:
        (whole,) = buffers.values()
        found, row = {}, 0
        for part in parts:
            found[part.name] = whole[row : row + part.rows]
            row += part.rows
        return found

    def seal(self, buffers: Mapping[str, torch.Tensor], parts: Sequence[Param]) -> None:
        (whole,) = buffers.values()
        whole[sum(p.rows for p in parts) :].zero_()


@dataclass(frozen=True)
class Packed(Padded):
    """All parts in one buffer, row after row."""

    multiple: int = 1
    label: ClassVar[str] = "packed"

    def __str__(self) -> str:
        return self.label

    def reads_as(self, wanted: Layout) -> bool:
        return isinstance(wanted, (Packed, Separate))


class StateLayout(Layout):
    """A layout of state: the shape of a pool, and how to pass from and to canonical order.

    ``tokens``: the axis of canonical order along which the last tokens lie, oldest first, where there is one.
    """

    tokens: ClassVar[int | None] = None

    def pool_shape(self, state: State, slots: int) -> tuple[int, ...]:
        """Shape of a pool of so many slots."""
        return (slots, *state.shape)

    def read(self, pool: torch.Tensor, state: State, lengths: Sequence[int]) -> torch.Tensor:
        """Canonical copy ``[slots, *state.shape]``; ``lengths`` are tokens seen so far, per slot."""
        return pool.clone()

    def write(self, pool: torch.Tensor, canonical: torch.Tensor, state: State, lengths: Sequence[int]) -> None:
        """Fill a pool from canonical order."""
        pool.copy_(canonical)


@dataclass(frozen=True)
class Shift(StateLayout):
    """Convolution state ``[slots, channels, width - 1]``: the last inputs, oldest first."""

    label: ClassVar[str] = "shift"
    tokens: ClassVar[int | None] = 1


@dataclass(frozen=True)
class Ring(StateLayout):
    """Convolution state ``[slots, channels, length]``: input of position p lies at p mod length.

    A step reads old places and writes another one, so many programs may share a channel
    without a race. Positions before the sequence's start hold anything: mask them.
    """

    length: int
    label: ClassVar[str] = "ring"
    tokens: ClassVar[int | None] = 1

    def __str__(self) -> str:
        return f"ring:{self.length}"

    def reads_as(self, wanted: Layout) -> bool:
        return isinstance(wanted, Ring) and self.length >= wanted.length

    def pool_shape(self, state: State, slots: int) -> tuple[int, ...]:
        return (slots, state.shape[0], self.length)

    def read(self, pool: torch.Tensor, state: State, lengths: Sequence[int]) -> torch.Tensor:
        kept = state.shape[1]
        found = pool.new_zeros((len(lengths), *state.shape))
        for slot, length in enumerate(lengths):
            for back in range(1, min(kept, length) + 1):
                found[slot, :, kept - back] = pool[slot, :, (length - back) % self.length]
        return found

    def write(self, pool: torch.Tensor, canonical: torch.Tensor, state: State, lengths: Sequence[int]) -> None:
        kept = state.shape[1]
        for slot, length in enumerate(lengths):
            for back in range(1, min(kept, length) + 1):
                pool[slot, :, (length - back) % self.length] = canonical[slot, :, kept - back]


@dataclass(frozen=True)
class Tail(StateLayout):
    """What the last tokens left, ``[slots, length, ...]``: that of position p lies at p mod length.

    A step that reads old places and writes others needs as many as both together.
    """

    length: int
    label: ClassVar[str] = "tail"
    tokens: ClassVar[int | None] = 0

    def __str__(self) -> str:
        return f"tail:{self.length}"

    def reads_as(self, wanted: Layout) -> bool:
        return isinstance(wanted, Tail) and self.length >= wanted.length

    def pool_shape(self, state: State, slots: int) -> tuple[int, ...]:
        return (slots, self.length, *state.shape[1:])

    def read(self, pool: torch.Tensor, state: State, lengths: Sequence[int]) -> torch.Tensor:
        kept = state.shape[0]
        found = pool.new_zeros((len(lengths), *state.shape))
        for slot, length in enumerate(lengths):
            for back in range(1, min(kept, length) + 1):
                found[slot, kept - back] = pool[slot, (length - back) % self.length]
        return found

    def write(self, pool: torch.Tensor, canonical: torch.Tensor, state: State, lengths: Sequence[int]) -> None:
        kept = state.shape[0]
        for slot, length in enumerate(lengths):
            for back in range(1, min(kept, length) + 1):
                pool[slot, (length - back) % self.length] = canonical[slot, kept - back]


@dataclass(frozen=True)
class VK(StateLayout):
    """Delta-rule state ``[slots, value_heads, V, K]``, K fastest; the canonical order."""

    label: ClassVar[str] = "vk"


@dataclass(frozen=True)
class KV(StateLayout):
    """Delta-rule state ``[slots, value_heads, K, V]``, V fastest."""

    label: ClassVar[str] = "kv"

    def pool_shape(self, state: State, slots: int) -> tuple[int, ...]:
        heads, value_dim, key_dim = state.shape
        return (slots, heads, key_dim, value_dim)

    def read(self, pool: torch.Tensor, state: State, lengths: Sequence[int]) -> torch.Tensor:
        return pool.transpose(-1, -2).clone()

    def write(self, pool: torch.Tensor, canonical: torch.Tensor, state: State, lengths: Sequence[int]) -> None:
        pool.copy_(canonical.transpose(-1, -2))


@dataclass(frozen=True)
class Pages(StateLayout):
    """Keys and values ``[pages, 2, page_size, kv_heads, head_dim]``; the canonical order."""

    label: ClassVar[str] = "pages"


def default_layout(memory: Sequence[Param] | State) -> Layout:
    """How memory lies that no kernel says anything about: what most can read."""
    return memory.canonical if isinstance(memory, State) else Packed()
