"""What a bind gives: a group of ops that share memory, and a callable for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from hal.choice import Choice, Piece, rows_text
from hal.errors import BindError, CheckError
from hal.layout import Layout, Param, State, StateLayout
from hal.ops.base import Op

if TYPE_CHECKING:
    import torch

    from hal.runtime import Runtime
    from hal.storage import Storage

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False)
class Group:
    """What was bound together: ops that share memory, their choices, their storages."""

    name: str
    members: dict[str, Op[..., Any]]
    choices: dict[str, Choice]
    fed: bool
    fixed: Mapping[str, Layout]
    storages: dict[str, Storage] = field(default_factory=dict)
    takes: Group | None = None
    claimed: bool = False
    runtime: Runtime | None = None
    bounds: dict[str, Bound[..., Any]] = field(default_factory=dict)

    def __getattr__(self, member: str) -> Any:
        # members are plain attributes, set at bind; only a missing one comes here
        raise AttributeError(f"{self.__dict__.get('name')} binds {sorted(self.__dict__['members'])}, not {member!r}")

    def site(self, member: str) -> str:
        """The name of a member's site: the group's own where it binds one op."""
        return self.name if member == "op" else f"{self.name}.{member}"

    @property
    def layouts(self) -> dict[str, Layout]:
        """How each memory of the group lies."""
        return {name: layout for choice in self.choices.values() for name, layout in choice.layouts.items()}

    def walk(self) -> Iterator[tuple[str, Choice]]:
        """The choices of all members and of their parts."""
        for member, choice in self.choices.items():
            yield from choice.walk(member)

    def states(self) -> dict[str, State]:
        """The states of all members, by name."""
        return {s.name: s for op in self.members.values() for s in op.states()}

    def state_bytes(self, slots: int) -> int:
        """Bytes of a pool of so many slots (or pages), in the layouts chosen."""
        from math import prod

        from hal.formats import Tensor

        return sum(
            Tensor(s.dtype).nbytes(prod(self._state_layout(s).pool_shape(s, slots))) for s in self.states().values()
        )

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Put a whole tensor for each parameter of all members, and seal."""
        for op in self.members.values():
            for param in op.params():
                self.storages[param.memory].put(param.name, values[param.name])
        for storage in self.storages.values():
            storage.seal()

    def new_state(self, slots: int) -> tuple[torch.Tensor, ...]:
        """A zeroed pool of so many slots (or pages), a tensor per state, in the layouts chosen."""
        import torch

        place = self.runtime.place if self.runtime else "cpu"
        return tuple(
            torch.zeros(self._state_layout(s).pool_shape(s, slots), dtype=getattr(torch, s.dtype), device=place)
            for s in self.states().values()
        )

    def _state_layout(self, state: State) -> StateLayout:
        layout = self.layouts[state.name]
        assert isinstance(layout, StateLayout)
        return layout


class Bound(partial[R], Generic[P, R]):
    """A kernel's callable at a site. Calling it is calling the kernel: no Python frame between."""

    name: str
    choice: Choice
    pieces: tuple[tuple[Piece, Callable[P, R]], ...]

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def at(self, rows: int) -> Callable[P, R]:
        """The callable for exactly so many rows; what a captured graph holds."""
        for piece, call in self.pieces:
            if piece.rows[1] is None or rows <= piece.rows[1]:
                return call
        raise AssertionError("pieces cover all rows")


def sound(name: str, members: Mapping[str, Op[..., Any]], fed: bool, consumer: Group | None) -> None:
    """Raise BindError for a bind that cannot mean anything."""
    if not members:
        raise BindError(f"{name}: binds no op")
    taken = {f.name for f in fields(Group)} | {n for n in dir(Group) if not n.startswith("_")}
    if clash := sorted(taken & set(members)):
        raise BindError(f"{name}: a member cannot be called {clash[0]!r}, a group has that itself")
    if fed and not all(hasattr(op, "x") for op in members.values()):
        raise BindError(f"{name}: {next(iter(members.values())).title()} has no fed input x")
    if consumer is None:
        return
    if not consumer.fed:
        raise BindError(f"{name}: feeds {consumer.name}, which is not bound with fed=True")
    makers = [op for op in members.values() if hasattr(op, "out")]
    if not makers:
        raise BindError(f"{name}: feeds {consumer.name}, and no op of it makes a format of one's choice (has out)")
    wanted = next(consumer.members["op"].signature().tensors("args")).shape[-1]
    for op in makers:
        if (made := next(op.signature().tensors("results")).shape[-1]) != wanted:
            raise BindError(f"{name}: {op.title()} makes {made} columns; {consumer.name} takes {wanted}")


def alike(name: str, members: Mapping[str, Op[..., Any]], owner: Group | None, own: Collection[str] = ()) -> set[str]:
    """Names of the members' memories but ``own``; BindError where those of one name differ, or nothing is shared."""
    if unknown := set(own) - {n for op in members.values() for n in op.memories()}:
        raise BindError(f"{name}: own: expected memories of it, got {', '.join(sorted(unknown))}")
    have = {n: _shape(m) for op in (owner.members if owner else {}).values() for n, m in op.memories().items()}
    found: set[str] = set()
    for op in members.values():
        for memory, parts in op.memories().items():
            if memory in own:
                continue
            if have.setdefault(memory, _shape(parts)) != _shape(parts):
                raise BindError(f"{name}: {memory} is shared as {have[memory]}; {op.title()} has {_shape(parts)}")
            found.add(memory)
    if owner and not found & owner.layouts.keys():
        raise BindError(f"{name}: shares nothing with {owner.name}: {sorted(found)} against {sorted(owner.layouts)}")
    return found


def _shape(memory: tuple[Param, ...] | State) -> str:
    parts = (memory,) if isinstance(memory, State) else memory
    return ", ".join(f"{p.name} {list(p.shape)} {p.dtype}" for p in parts)


def finish(
    bound: Bound[..., Any], name: str, choice: Choice, pieces: tuple[tuple[Piece, Callable[..., Any]], ...]
) -> Bound[..., Any]:
    bound.name, bound.choice, bound.pieces = name, choice, pieces
    return bound


def not_loaded(name: str, *args: Any) -> Any:
    raise BindError(f"{name}: was resolved only (Runtime(load=False)) and cannot be called")


def checked(choice: Choice, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The call behind ``HAL_CHECK``: arguments against the signature, pools against their layouts."""
    op = choice.op
    if named:
        raise CheckError(f"{op.title()}: arguments go by position, got {', '.join(named)}")
    op.check(*args)
    for state, pool in zip(op.states(), args[-2] if op.states() else (), strict=True):
        layout = choice.layouts[state.name]
        assert isinstance(layout, StateLayout)
        if tuple(pool.shape) != (wanted := layout.pool_shape(state, pool.shape[0])):
            text = f"expected {list(wanted)} ({layout}), got {list(pool.shape)}"
            raise CheckError(f"{op.title()}: state {state.name}: {text}")
    return call(*args)


def by_rows(op: Op[..., Any], pieces: tuple[tuple[Piece, Callable[..., Any]], ...]) -> Callable[..., Any]:
    """One comparison of an int per piece boundary."""
    index, place, axis = op.signature().rows_of()
    *firsts, (_, last) = pieces
    bounds = [(piece.rows[1], call) for piece, call in firsts]

    def pick(*args: Any) -> Any:
        value = args[index] if place is None else args[index][place]
        rows = (value[0] if isinstance(value, tuple) else value).shape[axis]
        for most, call in bounds:
            if rows <= most:
                return call(*args)
        return last(*args)

    pick.__name__ = " | ".join(f"{rows_text(p.rows)} {p.kernel.name}" for p, _ in pieces)
    return pick
