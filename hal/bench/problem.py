"""A problem of an op on the device in several copies: weights, arguments and states that no cache keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from hal.batch import Batch, make_batch
from hal.errors import HalError
from hal.formats import Encoded, Quantized, Tensor
from hal.ops.base import Arg, Op, Pack
from hal.policy import Policy
from hal.runtime import Runtime

if TYPE_CHECKING:
    import torch

ROTATED = 200_000_000  # bytes that all copies move at least
MOST_COPIES = 64


@dataclass(frozen=True)
class Problem:
    """``copies`` of one call of an op with so many rows, bound to one kernel.

    args, params, states and batch of each copy; ``calls`` runs each of them. bytes: what one call
    moves at least. Other libraries' kernels can be timed on the same tensors.
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


def problem(
    like: Runtime, op: Op[..., Any], kernel: str, rows: int, context: int = 1024, rotated: int = ROTATED
) -> Problem:
    """A problem whose copies move ``rotated`` bytes. Errors: HalError with the reason why the kernel is not for it.

    ``context``: tokens of each sequence before a decode step; a prefill is one sequence from its start.
    """
    runtime = _forced(like, op, kernel)
    batch = _batch(op, rows, context).to(runtime.place) if op.signature().batch else None
    moved = op.traffic(rows).bytes + _read_of_pages(op, batch)
    count = max(1, min(MOST_COPIES, -(-rotated // max(moved, 1))))
    args, params, states, calls, launches = [], [], [], [], 1
    for copy in range(count):
        bound = runtime.bind(op, f"copy{copy}", scales=_scales(op, runtime.place))
        if reason := bound.choice.why_not(kernel, rows):
            raise HalError(f"{kernel}: {reason}")
        launches = bound.choice.at(rows).launches
        group = runtime.group_of(bound)
        params.append({p.name: _normal(p.shape, p.dtype, runtime.place, *p.init) for p in op.params()})
        group.fill(params[-1])
        args.append(_arguments(op, rows, runtime.place, params[-1]))
        pools = group.new_state(_slots(batch)) if op.states() else ()
        for pool in pools:
            pool.normal_(0, 0.1)
        states.append(pools)
        rest = (*((pools,) if op.signature().state else ()), *((batch,) if batch is not None else ()))
        calls.append(partial(bound.at(rows), *args[-1], *rest))
    if batch is not None:
        runtime.begin(batch)
    return Problem(
        op, kernel, rows, moved, tuple(args), tuple(params), tuple(states), batch, tuple(calls), launches
    )  # fmt: skip


def _forced(like: Runtime, op: Op[..., Any], kernel: str) -> Runtime:
    policy = replace(like.policy, force=Policy.of(force=[f"{op.title()}={kernel}"]).force, strict=False)
    runtime = Runtime(like.device, policy, like.registry, place=like.place)
    runtime.resolver = like.resolver
    return runtime


def _batch(op: Op[..., Any], rows: int, context: int) -> Batch:
    """Single tokens in their slots, or one sequence; pages in no order."""
    mode = op.mode or "decode"
    if mode == "verify":
        raise HalError(f"{op.title()}: verification has no problem of rows alone")
    lengths, contexts = ([rows], [0]) if mode == "prefill" else ([1] * rows, [context] * rows)
    if not rows:
        lengths, contexts = [], []
    size = getattr(op, "page_size", 0)
    if not size:
        return make_batch(mode, lengths, contexts, range(len(lengths)))
    counts = [-(-(n + c) // size) for n, c in zip(lengths, contexts, strict=True)]
    total = sum(counts)
    step = next((s for s in (7, 11, 13) if total % s), 1)
    order = iter([i * step % total for i in range(total)])
    pages = [[next(order) for _ in range(count)] for count in counts]
    return make_batch(mode, lengths, contexts, range(len(lengths)), pages=pages, page_size=size)


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

    return {"out": torch.full((1,), 0.02, device=place)} if isinstance(getattr(op, "out", None), Quantized) else {}


def _normal(shape: tuple[int, ...], kind: str, place: str, mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
    import torch

    return torch.empty(shape, device=place).normal_(mean, deviation).to(getattr(torch, kind))


def _arguments(op: Op[..., Any], rows: int, place: str, params: Mapping[str, Any]) -> tuple[Any, ...]:
    """Packs are views of one buffer side by side, as a projection leaves them."""
    import torch

    def shape(arg: Arg) -> tuple[int, ...]:
        return tuple(rows if size == "rows" else int(size) for size in arg.shape)

    def one(arg: Arg) -> Any:
        if isinstance(arg.format, Quantized):
            return Encoded(_normal(shape(arg), arg.format.value, place), params["input_scale"])
        if arg.format.dtype.startswith("int"):
            kind = getattr(torch, arg.format.dtype)
            return torch.randint(getattr(op, "vocab", 8), shape(arg), device=place, dtype=kind)
        return _normal(shape(arg), arg.format.dtype, place)

    def pack(item: Pack) -> tuple[Any, ...]:
        flat = all(len(a.shape) == 2 and a.free == (0,) and isinstance(a.format, Tensor) for a in item.items)
        if not flat:
            return tuple(one(a) for a in item.items)
        widths = [shape(a)[1] for a in item.items]
        whole = _normal((rows, sum(widths)), item.items[0].format.dtype, place)  # type: ignore[union-attr]
        return tuple(whole.split(widths, 1))

    return tuple(pack(item) if isinstance(item, Pack) else one(item) for item in op.signature().args)
