"""What every logical op has in common: a problem, its contract, an oracle and cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf, prod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, ParamSpec, TypeVar

from hal.errors import CheckError, HalError
from hal.formats import Encoded, Format, Quantized, Scheme, dtype
from hal.layout import Param, State

if TYPE_CHECKING:
    from hal.batch import Batch

P = ParamSpec("P")
R = TypeVar("R")
Size = str | int


@dataclass(frozen=True)
class Arg:
    """One tensor of a signature. Sizes are numbers or symbols; axes in ``free`` may have any stride."""

    name: str
    shape: tuple[Size, ...]
    format: Format
    free: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.format} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Pack:
    """Several tensors that travel as one tuple."""

    name: str
    items: tuple[Arg, ...]

    def __str__(self) -> str:
        return f"{self.name}: ({'; '.join(map(str, self.items))})"


@dataclass(frozen=True)
class Signature:
    """Arguments and results in order. State and then Batch follow the arguments where they are used."""

    args: tuple[Arg | Pack, ...]
    results: tuple[Arg | Pack, ...]
    state: bool = False
    batch: bool = False

    def tensors(self, which: Literal["args", "results"]) -> Iterator[Arg]:
        """All tensors, packs opened."""
        for item in getattr(self, which):
            yield from item.items if isinstance(item, Pack) else (item,)

    def rows_of(self) -> tuple[int, int | None, int]:
        """Where the number of rows is read: argument, place in its pack (or None), axis."""
        for index, item in enumerate(self.args):
            for place, arg in enumerate(item.items if isinstance(item, Pack) else (item,)):
                if "rows" in arg.shape:
                    return index, place if isinstance(item, Pack) else None, arg.shape.index("rows")
        raise AssertionError("a signature without rows")


class Traffic(NamedTuple):
    """The least a problem must move and compute: what bounds its time."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Problem:
    """What a reference computes from: real values, canonical state, the batch."""

    args: Mapping[str, Any]
    params: Mapping[str, Any]
    states: Mapping[str, Any]
    batch: Any = None


Outcome = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A small problem that every kernel of the op must solve.

    ``lengths`` are the rows of each sequence in this step, ``contexts`` what it has seen
    before, ``slots`` where its state lies (negative: padding). ``variant`` names inputs
    that the op makes specially (``Op.adjust``). ``accepted``: of a verify step, see ``Batch``.
    """

    name: str
    op: Op[..., Any]
    lengths: tuple[int, ...]
    contexts: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    variant: str = ""
    mode: str = field(default="")
    accepted: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class Op(Generic[P, R]):
    """One logical operation. Its fields are the problem: local sizes, dtypes, formats of edges.

    Never rows, never a rank. Ops are values: equal fields, equal op.
    """

    world: int = 1
    coarse: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise HalError(f"{self.title()}: {f.name}: expected 1 or more, got {value}")
            if isinstance(value, float) and not 0 <= value < inf:
                raise HalError(f"{self.title()}: {f.name}: expected a finite number of 0 or more, got {value}")
            if f.name.endswith("dtype") and not dtype(value).floating:
                raise HalError(f"{self.title()}: {f.name}: expected a floating dtype, got {value}")

    @classmethod
    def title(cls) -> str:
        """The op's name, as policies and reports write it."""
        return cls.__name__

    @property
    def mode(self) -> str:
        """The mode of the batches it takes (prefill, decode, verify), or nothing."""
        return ""

    def schemes(self) -> tuple[Scheme, ...]:
        """How its weights are quantized: every scheme among its fields, and those of its parts."""
        return self._schemes

    @cached_property
    def _schemes(self) -> tuple[Scheme, ...]:
        found: dict[Scheme, None] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            for item in value if isinstance(value, tuple) else (value,):
                scheme = getattr(item, "scheme", item)
                if isinstance(scheme, Scheme):
                    found[scheme] = None
        return tuple(found)

    def quantized(self) -> str:
        """How its weights are quantized, for people; empty where none is."""
        found = [(f.name, scheme) for f in fields(self) if isinstance(scheme := getattr(self, f.name), Scheme)]
        return ", ".join(str(scheme) if name == "scheme" else f"{name} {scheme}" for name, scheme in found)

    def signature(self) -> Signature:
        """Arguments and results: names, shapes, formats, free strides."""
        raise NotImplementedError

    def params(self) -> tuple[Param, ...]:
        """The parameters, with this rank's sizes."""
        return ()

    def states(self) -> tuple[State, ...]:
        """The state kept between steps."""
        return ()

    def reference(self, problem: Problem) -> Outcome:
        """Results and new states in plain torch, as float as what goes in: the oracle."""
        raise NotImplementedError

    @classmethod
    def cases(cls) -> Sequence[Case]:
        """Small problems that a kernel must solve."""
        raise NotImplementedError

    def adjust(self, variant: str, problem: Problem) -> None:
        """Change made-up inputs in place for a case's ``variant``."""
        raise NotImplementedError(f"{self.title()} has no variant {variant!r}")

    def memories(self) -> dict[str, tuple[Param, ...] | State]:
        """Parameters grouped by memory, and states, by name."""
        return self._memories

    @cached_property
    def _memories(self) -> dict[str, tuple[Param, ...] | State]:
        found: dict[str, tuple[Param, ...] | State] = {}
        for param in self.params():
            found[param.memory] = (*found.get(param.memory, ()), param)  # type: ignore[misc]
        return found | {state.name: state for state in self.states()}

    def flops(self, rows: int) -> int:
        """Multiplications and additions: by default two per parameter of a matrix and row."""
        return 2 * rows * sum(prod(p.shape) for p in self.params() if len(p.shape) > 1)

    def traffic(self, rows: int) -> Traffic:
        """Bytes and operations at least: parameters once, arguments and results once, state in and out."""
        signature = self.signature()
        moved = sum(prod(p.shape) * dtype(p.dtype).bits // 8 for p in self.params())
        for which in ("args", "results"):
            for arg in signature.tensors(which):
                sizes = [rows if size == "rows" else size for size in arg.shape]
                moved += arg.format.nbytes(prod(s for s in sizes if isinstance(s, int)))
        return Traffic(moved + self.state_bytes(rows), self.flops(rows))

    def state_bytes(self, rows: int) -> int:
        """State in and out, one slot per row."""
        return sum(2 * rows * prod(state.shape) * dtype(state.dtype).bits // 8 for state in self.states())

    def check(self, *args: Any) -> None:
        """Raise CheckError unless the arguments fit the signature, strides and slots included."""
        check(self, args)

    def __str__(self) -> str:
        shown = ", ".join(f"{f.name}={_short(getattr(self, f.name))}" for f in fields(self))
        return f"{self.title()}({shown})"


def _short(value: Any) -> str:
    if isinstance(value, tuple) and value and hasattr(value[0], "name"):
        return "(" + " ".join(str(item) for item in value) + ")"
    return str(value)


def check(op: Op[..., Any], args: Sequence[Any]) -> None:
    """The check behind ``Op.check``: shapes, dtypes, strides; slots of a batch."""
    signature = op.signature()
    expected = len(signature.args) + signature.state + signature.batch
    if len(args) != expected:
        raise CheckError(f"{op.title()}: takes {expected} arguments, got {len(args)}")
    symbols: dict[str, int] = {}
    for item, value in zip(signature.args, args, strict=False):
        if isinstance(item, Arg):
            _check_format(op, item, value, symbols)
            continue
        if not isinstance(value, tuple) or len(value) != len(item.items):
            got = f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
            raise CheckError(f"{op.title()}: {item.name}: expected a tuple of {len(item.items)} tensors, got {got}")
        for arg, tensor in zip(item.items, value, strict=True):
            _check_format(op, arg, tensor, symbols)
    slots = _check_state(op, args[len(signature.args)]) if signature.state else None
    if signature.batch:
        _check_batch(op, args[-1], symbols.get("rows", 0), slots)
    _check_places(op, signature, args)


def _check_places(op: Op[..., Any], signature: Signature, args: Sequence[Any]) -> None:
    """All tensors lie on the device of the first."""
    found: list[tuple[str, Any]] = []
    for item, given in zip(signature.args, args, strict=False):
        pairs = zip(item.items, given, strict=True) if isinstance(item, Pack) else ((item, given),)
        found += [(arg.name, value.value if isinstance(value, Encoded) else value) for arg, value in pairs]
    if signature.state:
        found += [(f"state {s.name}", pool) for s, pool in zip(op.states(), args[len(signature.args)], strict=True)]
    if signature.batch:
        found.append(("batch", args[-1].slots))
    first, place = found[0][0], found[0][1].device
    for name, value in found:
        if value.device != place:
            raise CheckError(f"{op.title()}: {name}: expected on {place} as {first} is, got {value.device}")


def _check_state(op: Op[..., Any], pools: Any) -> int:
    """Number of slots in the pools, whose count and dtypes must be the states'."""
    states = op.states()
    if not isinstance(pools, tuple) or len(pools) != len(states) or not all(hasattr(p, "stride") for p in pools):
        got = f"a tuple of {len(pools)}" if isinstance(pools, tuple) else type(pools).__name__
        raise CheckError(f"{op.title()}: state: expected pools of {', '.join(s.name for s in states)}, got {got}")
    for state, pool in zip(states, pools, strict=True):
        if str(pool.dtype) != f"torch.{state.dtype}" or pool.shape[0] != pools[0].shape[0]:
            raise CheckError(
                f"{op.title()}: state {state.name}: expected {state.dtype} [{pools[0].shape[0]}, ...], "
                f"got {str(pool.dtype).removeprefix('torch.')} {list(pool.shape)}"
            )
    return int(pools[0].shape[0])


def _check_format(op: Op[..., Any], arg: Arg, value: Any, symbols: dict[str, int]) -> None:
    if isinstance(arg.format, Quantized):
        if not isinstance(value, Encoded):
            raise CheckError(f"{op.title()}: {arg.name}: expected {arg.format}, got {type(value).__name__}")
        form, packed = arg.format, arg
        if form.packs > 1:
            packed = replace(arg, shape=(*arg.shape[:-1], int(arg.shape[-1]) // form.packs))
        _check_tensor(op, packed, form.stored, value.value, symbols)
        wanted, scale = form.scale.shape(len(value.value), int(arg.shape[-1])), value.scale
        if tuple(scale.shape) != wanted or str(scale.dtype) != f"torch.{form.scale.stored}":
            got = f"{str(scale.dtype).removeprefix('torch.')} {list(scale.shape)}"
            text = f"expected {form.scale.stored} {list(wanted)}, got {got}"
            raise CheckError(f"{op.title()}: scale of {arg.name}: {text}")
        if form.scale.within and (not hasattr(value.within, "shape") or tuple(value.within.shape) != (1,)):
            got = "none" if value.within is None else str(list(value.within.shape))
            raise CheckError(f"{op.title()}: global scale of {arg.name}: expected float32 [1], got {got}")
    else:
        _check_tensor(op, arg, arg.format.dtype, value, symbols)


def _check_tensor(op: Op[..., Any], arg: Arg, kind: str, tensor: Any, symbols: dict[str, int]) -> None:
    where = f"{op.title()}: {arg.name}"
    if not hasattr(tensor, "stride"):
        raise CheckError(f"{where}: expected {arg}, got {type(tensor).__name__}")
    got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if len(tensor.shape) != len(arg.shape):
        raise CheckError(f"{where}: expected {arg}, got {got}")
    for size, have in zip(arg.shape, tensor.shape, strict=True):
        want = symbols.setdefault(size, have) if isinstance(size, str) else size
        if want != have:
            equal = f" with {size} = {want}" if isinstance(size, str) else ""
            raise CheckError(f"{where}: expected {arg}{equal}, got {got}")
    if str(tensor.dtype) != f"torch.{kind}":
        raise CheckError(f"{where}: expected {arg}, got {got}")
    dense, strides = 1, tensor.stride()
    for axis in reversed(range(len(arg.shape))):
        if axis not in arg.free and tensor.shape[axis] > 1 and strides[axis] != dense:
            raise CheckError(f"{where}: axis {axis} must have stride {dense}, the strides are {strides}")
        dense = dense * tensor.shape[axis] if axis not in arg.free else strides[axis] * tensor.shape[axis]


def _check_batch(op: Op[..., Any], batch: Batch, rows: int, slots: int | None) -> None:
    if not hasattr(batch, "host"):
        raise CheckError(f"{op.title()}: batch: expected a Batch, got {type(batch).__name__}")
    if op.mode and batch.mode != op.mode:
        raise CheckError(f"{op.title()}: batch: expected one of mode {op.mode}, got {batch.mode}")
    tokens = batch.host.tokens
    if rows != tokens:
        raise CheckError(f"{op.title()}: batch: expected {rows} rows, it describes {tokens} tokens")
    size = getattr(op, "page_size", 0)
    if size and slots is not None:
        most = max((n for n, s in zip(batch.host.kv_lengths, batch.host.slots, strict=True) if s >= 0), default=0)
        if batch.page_table.shape[1] * size < most:
            raise CheckError(
                f"{op.title()}: batch.page_table: expected pages of {size} for {most} tokens, "
                f"got {batch.page_table.shape[1]}"
            )
    if slots is None:
        return
    used = [slot for slot in batch.host.slots if slot >= 0]
    if op.states() and op.states()[0].name != "kv" and used and max(used) >= slots:
        raise CheckError(f"{op.title()}: batch.slots: expected less than {slots}, got {max(used)}")
    if len(set(used)) != len(used):
        raise CheckError(f"{op.title()}: batch.slots: a slot is listed twice: {sorted(used)}")
