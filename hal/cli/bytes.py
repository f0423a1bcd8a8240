"""What a plan costs in memory: parameters of a rank, state of a sequence, keys and values of a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hal.binding import Group
from hal.formats import Tensor
from hal.layout import Pages, ParamLayout, State, StateLayout
from hal.runtime import Runtime


@dataclass(frozen=True)
class Sizes:
    """Bytes on one rank, padding included."""

    parameters: int
    per_slot: int
    per_token: float


def sizes(runtime: Runtime) -> Sizes:
    """Bytes of a plan. Memory that a later op shares is its owner's and counts once."""
    parameters = slot = 0
    token = 0.0
    for group in runtime.groups:
        parameters += sum(_parameters(group))
        for state in group.states().values():
            if state.name in group.fixed:
                continue
            layout = group.layouts[state.name]
            assert isinstance(layout, StateLayout)
            one = Tensor(state.dtype).nbytes(prod(layout.pool_shape(state, 1)))
            if isinstance(state.canonical, Pages):
                token += one / state.shape[1]
            else:
                slot += one
    return Sizes(parameters, slot, token)


def _parameters(group: Group) -> Iterator[int]:
    seen: set[str] = set()
    for op in group.members.values():
        for name, memory in op.memories().items():
            if isinstance(memory, State) or name in group.fixed or name in seen:
                continue
            seen.add(name)
            layout = group.layouts[name]
            assert isinstance(layout, ParamLayout)
            for shape, dtype in layout.buffers(memory).values():
                yield Tensor(dtype).nbytes(prod(shape))
