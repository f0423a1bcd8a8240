"""A problem of an op on the device in several copies: weights, arguments and states that no cache keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

from hal.batch import Batch, make_batch
from hal.errors import HalError
from hal.formats import Quantized, Tensor
from hal.ops.base import Arg, Op, Pack
from hal.ops.formulas import encode
from hal.ops.move import COLLECTIVES
from hal.policy import Rule
from hal.runtime import Runtime

if TYPE_CHECKING:
    import torch

ROTATED = 200_000_000  # bytes that all copies move, as far as the next two allow
MOST_COPIES = 64
HELD = 8_000_000_000  # bytes that all copies hold at most: a call may move little of a large table


@dataclass(frozen=True)
class Problem:
    """``copies`` of one call of an op with so many rows, bound to one kernel.

    args, params, states and batch of each copy; ``calls`` runs each of them. bytes: what one call
    moves at least. captures: a graph may hold the calls. Other libraries' kernels can be timed on the same tensors.
    """

    op: Op[..., Any]
    kernel: str
    rows: int
    bytes: int
    args: tuple[tuple[Any, ...], ...]
    params: tuple[Mapping[str, torch.Tensor], ...]
    states: tuple[tuple[torch.Tensor, ...], ...]
    batch: Batch | None
    calls: tuple[Callable[[], Any], ...]
    launches: int
    captures: bool


def problem(
    like: Runtime, op: Op[..., Any], kernel: str, rows: int, context: int = 1024, rotated: int = ROTATED
) -> Problem:
    """A problem whose copies move ``rotated`` bytes, or as many copies as memory is given to.

    ``context``: tokens of each sequence before a decode or verify step, and of the latter all that can be
    are pending; a prefill is one sequence from its start.
    Errors: HalError with the reason why the kernel is not for it.
    """
    if isinstance(op, COLLECTIVES):
        raise HalError("joins ranks: of one rank alone there is nothing to time")
    runtime = _forced(like, op, kernel)
    rules = runtime.policy.at("copy0")
    if reason := runtime.resolver.why_not(op, kernel, rows, rules):
        raise HalError(reason)
    (choice,) = runtime.resolver.resolve((op,), rules)
    batch = _batch(op, rows, context).to(runtime.place) if op.signature().batch else None
    moved = op.traffic(rows).bytes + _read_of_pages(op, batch)
    first, held = _copy(runtime, op, rows, batch, 0)
    count = max(1, min(MOST_COPIES, -(-rotated // max(moved, 1)), HELD // max(held, 1)))
    copies = [first, *(_copy(runtime, op, rows, batch, index)[0] for index in range(1, count))]
    args, params, states, calls = zip(*copies, strict=True)
    if batch is not None:
        runtime.begin(batch)
    piece = choice.at(rows)
    return Problem(op, kernel, rows, moved, args, params, states, batch, calls, piece.launches, piece.captures)


def _copy(
    runtime: Runtime, op: Op[..., Any], rows: int, batch: Batch | None, index: int
) -> tuple[tuple[tuple[Any, ...], Mapping[str, torch.Tensor], tuple[torch.Tensor, ...], Callable[[], Any]], int]:
    """Arguments, parameters, states and call of one copy; and the bytes that it holds."""
    bound = runtime.bind(op, f"copy{index}", scales=_scales(op, runtime.place))
    group = runtime.group_of(bound)
    params = {p.name: _normal(p.shape, p.dtype, runtime.place, *p.init) for p in op.params()}
    group.fill(params)
    args = _arguments(op, rows, runtime.place, params)
    pools = group.new_state(_slots(batch)) if op.states() else ()
    for pool in pools:
        pool.normal_(0, 0.1, generator=_random(runtime.place))
    rest = (*((pools,) if op.signature().state else ()), *((batch,) if batch is not None else ()))
    # a kernel reads parameters in its own layout, others' kernels as they are: both are held
    held = _nbytes((args, *params.values(), pools)) + sum(storage.nbytes for storage in group.storages.values())
    return (args, params, pools, partial(bound.at(rows), *args, *rest)), held


def _nbytes(value: Any) -> int:
    """Bytes of all tensors in tuples of tuples."""
    return sum(map(_nbytes, value)) if isinstance(value, tuple) else int(value.nbytes)


def _forced(like: Runtime, op: Op[..., Any], kernel: str) -> Runtime:
    """A runtime where the kernel serves the op; what the user forces for other ops still holds."""
    others = tuple(rule for rule in like.policy.force if rule.op != op.title())
    force = (Rule(kernel, op.title()), *others)
    return like.fresh(replace(like.policy, force=force, strict=False))


def _batch(op: Op[..., Any], rows: int, context: int) -> Batch:
    """Single tokens in their slots, as many as can be verified, or one sequence; pages in no order."""
    mode, each = op.mode or "decode", 1
    if mode == "verify":
        each = getattr(op, "queries", 4)
    lengths, contexts = ([rows], [0]) if mode == "prefill" else (_split(rows, each), [context] * -(-rows // each))
    if not rows:
        lengths, contexts = [], []
    accepted = [min(n, context) for n in lengths] if mode == "verify" else ()
    size = getattr(op, "page_size", 0)
    if not size:
        return make_batch(mode, lengths, contexts, range(len(lengths)), accepted=accepted)
    counts = [-(-(n + c) // size) for n, c in zip(lengths, contexts, strict=True)]
    total = sum(counts)
    step = next((s for s in (7, 11, 13) if total % s), 1)
    order = iter([i * step % total for i in range(total)])
    pages = [[next(order) for _ in range(count)] for count in counts]
    return make_batch(mode, lengths, contexts, range(len(lengths)), pages=pages, page_size=size, accepted=accepted)


def _split(rows: int, each: int) -> list[int]:
    """Rows of sequences that have ``each``, the last one what is left."""
    return [min(each, rows - at) for at in range(0, rows, each)]


def _slots(batch: Batch | None) -> int:
    """Slots of the pools, or pages where they hold pages."""
    if batch is None:
        return 1
    return max(1, batch.page_table.numel(), batch.sequences)


def _read_of_pages(op: Op[..., Any], batch: Batch | None) -> int:
    """Bytes of keys and values that attention reads."""
    if batch is None or not hasattr(op, "page_size") or op.state_bytes(1):
        return 0
    each = sum(prod(s.shape) * Tensor(s.dtype).nbytes(1) for s in op.states())
    return sum(batch.host.kv_lengths) * each // int(op.page_size)


def _scales(op: Op[..., Any], place: str) -> dict[str, Any]:
    import torch

    out = getattr(op, "out", None)
    fixed = isinstance(out, Quantized) and out.scale.fixed
    return {"out": torch.full((1,), 0.02, device=place)} if fixed else {}


def _normal(shape: tuple[int, ...], kind: str, place: str, mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
    import torch

    made = torch.empty(shape, device=place).normal_(mean, deviation, generator=_random(place))
    # bytes of packed codes, or powers of two
    return (made.round().clamp(0, 254) if kind == "uint8" else made).to(getattr(torch, kind))


@cache
def _random(place: str) -> torch.Generator:
    """Of its own: a capture that fails leaves torch's default one unusable."""
    import torch

    return torch.Generator("cpu" if place == "meta" else place).manual_seed(0)


def _arguments(op: Op[..., Any], rows: int, place: str, params: Mapping[str, Any]) -> tuple[Any, ...]:
    """Packs are views of one buffer side by side, as a projection leaves them."""
    import torch

    def shape(arg: Arg) -> tuple[int, ...]:
        return tuple(rows if size == "rows" else int(size) for size in arg.shape)

    def one(arg: Arg) -> Any:
        if isinstance(arg.format, Quantized):
            return encode(_normal(shape(arg), "float32", place), arg.format, params.get("input_scale"))
        if arg.format.dtype.startswith("int"):
            kind = getattr(torch, arg.format.dtype)
            most = getattr(op, "vocab", 8)
            return torch.randint(most, shape(arg), device=place, dtype=kind, generator=_random(place))
        return _normal(shape(arg), arg.format.dtype, place)

    def pack(item: Pack) -> tuple[Any, ...]:
        flat = all(len(a.shape) == 2 and a.free == (0,) and isinstance(a.format, Tensor) for a in item.items)
        if not flat:
            return tuple(one(a) for a in item.items)
        widths = [shape(a)[1] for a in item.items]
        whole = _normal((rows, sum(widths)), item.items[0].format.dtype, place)  # type: ignore[union-attr]
        return tuple(whole.split(widths, 1))

    return tuple(pack(item) if isinstance(item, Pack) else one(item) for item in op.signature().args)
