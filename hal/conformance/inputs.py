"""Made-up inputs for a case: random values in the formats of the signature, strided where that is free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hal.batch import Batch, make_batch
from hal.formats import Encoded, Quantized
from hal.ops.base import Arg, Case, Pack, Problem
from hal.ops.formulas import decode, encode

if TYPE_CHECKING:
    import torch

PAGES_SPARE = 2  # pages that belong to nobody, to see that nothing writes there


@dataclass
class Inputs:
    """A case made concrete: what the kernel gets, and the same in float64 for the reference."""

    case: Case
    problem: Problem
    scales: dict[str, torch.Tensor]
    slots: int
    lengths: list[int]  # tokens each slot has seen before the step

    @property
    def batch(self) -> Batch | None:
        found: Batch | None = self.problem.batch
        return found


def make(case: Case, seed: int = 0) -> Inputs:
    """Float64 values that the formats of the case hold exactly, so kernel and reference see the same."""
    import torch

    generator = torch.Generator().manual_seed(seed * 1009 + len(case.name))
    op = case.op

    def normal(shape: tuple[int, ...], kind: str, mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * deviation + mean
        if kind == "uint8":  # codes in bytes, or powers of two
            return values.round().clamp(0, 254)
        return values.to(torch.float32).to(getattr(torch, kind)).to(torch.float64)

    signature = op.signature()
    batch = _batch(case) if signature.batch else None
    params = {p.name: normal(p.shape, p.dtype, *p.init) for p in op.params()}
    scales = {}
    out = getattr(op, "out", None)
    if isinstance(out, Quantized) and out.scale.fixed:
        scales["out"] = torch.tensor([0.02])
        params["out_scale"] = scales["out"].double()
    args: dict[str, Any] = {}
    for arg in signature.tensors("args"):
        shape = tuple(case.rows if s == "rows" else int(s) for s in arg.shape)
        if isinstance(arg.format, Quantized):
            codes = encode(normal(shape, "float32"), arg.format, input_scale(params))
            args[arg.name] = decode(codes, arg.format, torch.float64)
        elif arg.format.dtype in ("int64", "int32"):
            top = getattr(op, "vocab", 8)
            args[arg.name] = torch.randint(top, shape, generator=generator)
        else:
            args[arg.name] = normal(shape, arg.format.dtype)
    slots = _slots(case)
    states = {s.name: normal((slots, *s.shape), s.dtype, 0.0, 0.5) for s in op.states()}
    problem = Problem(args, params, states, batch)
    if case.variant:
        op.adjust(case.variant, problem)
        for arg in signature.tensors("args"):
            value = args[arg.name]
            if not isinstance(arg.format, Quantized) and value.is_floating_point():
                args[arg.name] = value.to(getattr(torch, arg.format.dtype)).double()
        for p in op.params():
            params[p.name] = params[p.name].to(getattr(torch, p.dtype)).double()
    lengths = [0] * slots
    for slot, context in zip(case.slots, case.contexts, strict=True):
        if slot >= 0:
            lengths[slot] = context
    for state in op.states():
        axis = state.canonical.tokens
        if axis is not None:
            for slot, length in enumerate(lengths):
                # what lies before a sequence's start is zero, once it has begun; before, anything
                if length:
                    states[state.name][slot].narrow(axis, 0, max(0, state.shape[axis] - length)).zero_()
    return Inputs(case, problem, scales, slots, lengths)


def input_scale(params: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The static scale of x among an op's parameters, where it has one."""
    return params["input_scale"].float() if "input_scale" in params else None


def _kv(case: Case) -> int:
    return int(getattr(case.op, "page_size", 0))


def _pages(case: Case) -> list[list[int]]:
    """Pages of each sequence, dealt out from the back so that tables are not the identity."""
    size = _kv(case)
    counts = [-(-(c + n) // size) for c, n in zip(case.contexts, case.lengths, strict=True)]
    free = list(range(sum(counts) + PAGES_SPARE))
    return [[free.pop() for _ in range(count)] for count in counts]


def _slots(case: Case) -> int:
    if _kv(case):
        return sum(map(len, _pages(case))) + PAGES_SPARE
    return max([*case.slots, 0]) + 3


def _batch(case: Case) -> Batch:
    paged = {"pages": _pages(case), "page_size": _kv(case)} if _kv(case) and case.lengths else {}
    return make_batch(case.mode, case.lengths, case.contexts, case.slots, accepted=case.accepted, **paged)  # type: ignore[arg-type]


def last_rows(inputs: Inputs, count: int) -> Inputs | None:
    """The last rows of a case as a case of their own, or nothing where rows are not told apart simply."""
    case, signature = inputs.case, inputs.case.op.signature()
    one_each = case.mode == "decode" and set(case.lengths) == {1} and bool(case.op.states())
    if count >= case.rows or _kv(case) or (signature.batch and not one_each):
        return None
    if one_each:
        lengths: tuple[int, ...] = (1,) * count
    elif len(case.lengths) == 1:
        lengths = (count,)
    else:
        return None
    fewer = replace(case, lengths=lengths, contexts=case.contexts[-count:], slots=case.slots[-count:])
    args = {name: value[-count:] for name, value in inputs.problem.args.items()}
    batch = _batch(fewer) if signature.batch else None
    problem = Problem(args, inputs.problem.params, inputs.problem.states, batch)
    return Inputs(fewer, problem, inputs.scales, inputs.slots, inputs.lengths)


def arguments(inputs: Inputs, place: str, strided: bool) -> Iterator[Any]:
    """The arguments for a kernel, packs as tuples; free axes get odd strides when ``strided``."""
    for item in inputs.case.op.signature().args:
        if isinstance(item, Pack):
            yield tuple(_argument(arg, inputs, place, strided) for arg in item.items)
        else:
            yield _argument(item, inputs, place, strided)


def _argument(arg: Arg, inputs: Inputs, place: str, strided: bool) -> Any:
    import torch

    value = inputs.problem.args[arg.name]
    if isinstance(arg.format, Quantized):
        codes = encode(value, arg.format, input_scale(inputs.problem.params))
        return Encoded(*(None if part is None else part.to(place) for part in codes))
    tensor = value.to(getattr(torch, arg.format.dtype)).to(place)
    if not strided or not arg.free or not tensor.numel():
        return tensor
    # a view into a wider buffer of NaN: what is read beside it shows
    padded = [size + 8 if axis - 1 in arg.free else size for axis, size in enumerate(tensor.shape)]
    wide = torch.full(padded, float("nan"), dtype=tensor.dtype, device=place)
    view = wide[tuple(slice(4, 4 + s) if p != s else slice(None) for s, p in zip(tensor.shape, padded, strict=True))]
    view.copy_(tensor)
    return view
