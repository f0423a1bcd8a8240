"""Runs a kernel on an op's cases and compares with the reference: results, states, what must not move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hal.backend import said
from hal.binding import Bound
from hal.conformance.inputs import Inputs, arguments, last_rows, make
from hal.errors import HalError
from hal.evidence import FellBack
from hal.formats import Encoded, Quantized
from hal.layout import StateLayout
from hal.numerics import Class, Numerics
from hal.ops import OPS
from hal.ops.base import Case, Op
from hal.ops.formulas import decode, scale_values, sequences, spread
from hal.policy import Policy
from hal.runtime import Runtime

if TYPE_CHECKING:
    import torch

# how far a result may lie from float64, as a share of the largest value it is compared with, by the
# dtype it is written in: two roundings of that dtype and the sums of a few hundred terms before them
SHARE = {"bfloat16": 2.0**-7, "float16": 2.0**-9, "float32": 2.0**-17, "float8_e4m3fn": 2.0**-3, "float4_e2m1": 2.0**-1}
# what encoding a value on the way may cost, beside the largest result: errors of single elements average out
ENCODED = {"float8_e4m3fn": 2.0**-5, "float8_e4m3fnuz": 2.0**-5, "float4_e2m1": 2.0**-2}


@dataclass(frozen=True)
class Verdict:
    """One case on one kernel: passed, failed and how, or refused and why."""

    op: str
    kernel: str
    case: str
    status: Literal["passed", "failed", "refused"]
    detail: str = ""


def verify(runtime: Runtime, ops: Iterable[type[Op[..., Any]]] | None = None) -> Iterator[Verdict]:
    """Every case of the ops on every kernel of the runtime's registry that is eligible."""
    for op in ops or OPS.values():
        for name in runtime.registry.names(op):
            yield from verify_kernel(runtime, op, name)


def verify_kernel(
    runtime: Runtime, op: type[Op[..., Any]], kernel: str, strided: bool = True, repeats: int = 2
) -> Iterator[Verdict]:
    """Every case of an op on one kernel, which is forced; a second call shows what claims to be deterministic."""
    policy = replace(
        runtime.policy,
        force=Policy.of(force=[f"{op.title()}={kernel}"]).force,
        numerics=Class.LOSSY,
        strict=False,
    )
    forced = runtime.fresh(policy, load=False)
    for case in op.cases():
        try:
            reason = forced.resolver.why_not(case.op, kernel, case.rows, policy.at(case.name))
        except HalError as error:
            reason = str(error).splitlines()[0]
        if reason:
            yield Verdict(op.title(), kernel, case.name, "refused", reason)
            continue
        try:
            problems = [p for s in {False, strided} for p in _run(forced, case, s, repeats)]
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is its verdict
            problems = [f"raised {said(error)}"]
        yield Verdict(op.title(), kernel, case.name, "failed" if problems else "passed", "; ".join(problems))


def fallbacks(runtime: Runtime, ops: Iterable[type[Op[..., Any]]]) -> tuple[FellBack, ...]:
    """What falls back on the ops' cases where nothing is forced, or what nothing serves; each kernel's first story."""
    found: dict[tuple[str, str], FellBack] = {}
    for op in ops:
        for case in op.cases():
            kernel, why = "no kernel", ""
            try:
                (choice,) = runtime.resolver.resolve((case.op,), runtime.policy.at(case.name))
                kernel, why = choice.kernels(), choice.fell_back
            except HalError as error:
                why = " ".join(str(error).split())
            if why:
                found.setdefault((op.title(), kernel), FellBack(op.title(), kernel, why))
    return tuple(found.values())


def _typed(value: torch.Tensor, kind: str) -> torch.Tensor:
    import torch

    return value.to(torch.float32).to(getattr(torch, kind))


def _run(resolved: Runtime, case: Case, strided: bool, repeats: int) -> Iterator[str]:
    import torch

    inputs = make(case)
    place = resolved.place
    runtime = resolved.fresh()  # without the plans of other cases
    bound = runtime.bind(case.op, case.name, scales={n: s.to(place) for n, s in inputs.scales.items()})
    op, given = case.op, inputs.problem.params
    runtime.group_of(bound).fill({p.name: _typed(given[p.name], p.dtype) for p in op.params()})
    results, states = op.reference(inputs.problem)
    first: list[Any] | None = None
    piece = bound.choice.at(case.rows)
    numerics = piece.numerics(op)
    for _ in range(repeats):
        got, pools = _call(runtime, bound, inputs, strided)
        yield from _compare(op, got, results, numerics)
        yield from _states(inputs, pools, states, _between(op, numerics))
        if first is None:
            first = [_bits(t).clone() for t in got]
        elif numerics.deterministic and not all(torch.equal(a, _bits(b)) for a, b in zip(first, got, strict=True)):
            yield "claims to be deterministic; the second run gave other bits"
    count = max(1, piece.rows[0])
    fewer = last_rows(inputs, count) if numerics.batch_invariant and not strided else None
    if fewer is not None and first is not None:
        alone, _ = _call(runtime, bound, fewer, False)
        if not all(torch.equal(_bits(a), b[-len(_bits(a)) :]) for a, b in zip(alone, first, strict=True)):
            yield f"claims to be batch invariant; the last {count} rows for themselves gave other bits"


def _call(runtime: Runtime, bound: Bound[..., Any], inputs: Inputs, strided: bool) -> tuple[list[Any], dict[str, Any]]:
    """One call on fresh pools: results, and for each state its layout, its pool and the pool before."""
    import torch

    op, place = inputs.case.op, runtime.place
    pools: dict[str, Any] = {}
    for state in op.states():
        layout = bound.choice.layouts[state.name]
        assert isinstance(layout, StateLayout)
        shape = layout.pool_shape(state, inputs.slots)
        pool = torch.full(shape, float("nan"), dtype=getattr(torch, state.dtype), device=place)
        before = _typed(inputs.problem.states[state.name], state.dtype).to(place)
        layout.write(pool, before, state, inputs.lengths)
        pools[state.name] = (state, layout, pool, pool.clone())
    args = list(arguments(inputs, place, strided))
    if op.signature().state:
        args.append(tuple(pool for _, _, pool, _ in pools.values()))
    if inputs.batch is not None:
        args.append(inputs.batch.to(place))
        runtime.begin(args[-1])
    op.check(*args)
    _poison(place)
    return _flat(bound(*args)), pools


def _poison(place: str) -> None:
    """Leave NaN bytes where the next allocations are likely to lie."""
    import torch

    for size in (64, 1024, 16384, 262144):
        torch.full((size,), 0xFF, dtype=torch.uint8, device=place)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple) and not isinstance(value, Encoded):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _bits(value: Any) -> torch.Tensor:
    import torch

    tensor: torch.Tensor = value.value if isinstance(value, Encoded) else value
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def _compare(op: Op[..., Any], got: list[Any], wanted: tuple[Any, ...], numerics: Numerics) -> Iterator[str]:
    import torch

    expected = list(op.signature().tensors("results"))
    if len(got) != len(expected):
        yield f"gave {len(got)} results, the signature has {len(expected)}"
        return
    for arg, have, want in zip(expected, got, wanted, strict=True):
        form = arg.format
        name = form.value if isinstance(form, Quantized) else form.dtype
        stored = form.stored if isinstance(form, Quantized) else form.dtype
        tensor = have.value if isinstance(have, Encoded) else have
        if isinstance(form, Quantized) != isinstance(have, Encoded) or str(tensor.dtype) != f"torch.{stored}":
            yield f"{arg.name}: expected {form}, got {tensor.dtype}"
            continue
        wide = tensor.shape[-1] * (form.packs if isinstance(form, Quantized) else 1)
        if isinstance(form, Quantized) and (shape := form.scale.shape(len(tensor), wide)) != tuple(have.scale.shape):
            yield f"{arg.name}: expected scales {list(shape)}, got {list(have.scale.shape)}"
            continue
        value, real = have, want
        if isinstance(form, Quantized):
            value = decode(have, form, torch.float64)
            real = decode(want, form, torch.float64) if isinstance(want, Encoded) else want
            scale = scale_values(have.scale, form.scale, have.within)
            limit = form.limit * spread(scale.double(), form.scale, *value.shape)
            real = real.to(limit.device).clamp(-limit, limit)
        value, real = value.double().cpu(), real.double().cpu()
        if value.shape != real.shape:
            yield f"{arg.name}: expected {list(real.shape)}, got {list(value.shape)}"
        elif numerics.kind is Class.EXACT and not torch.equal(value, real):
            yield f"{arg.name}: claims EXACT and differs in {int((value != real).sum())} places"
        elif not torch.isfinite(value).all():
            yield f"{arg.name}: {int((~torch.isfinite(value)).sum())} values are not finite"
        elif value.numel():
            yield from _near(arg.name, value, real, SHARE.get(name, 0.0) + _between(op, numerics))


def _between(op: Op[..., Any], numerics: Numerics) -> float:
    """What the roundings on the way add to the share."""
    narrow = sum(ENCODED[kind] for kind in numerics.narrow)
    return numerics.roundings * SHARE[getattr(op, "dtype", "float32")] + narrow


def _near(name: str, value: torch.Tensor, real: torch.Tensor, share: float) -> Iterator[str]:
    error = float((value - real).abs().max())
    allowed = share * max(float(real.abs().max()), 1e-6)
    if error > allowed:
        yield f"{name}: off by {error:.3g}, allowed {allowed:.3g} ({share:.3g} of the largest value)"
    zero = (real == 0).all(-1) if real.dim() > 1 else real == 0
    if value[zero].any():
        yield f"{name}: rows that must be exactly zero are not"


def _states(inputs: Inputs, pools: dict[str, Any], wanted: dict[str, Any], between: float) -> Iterator[str]:
    import torch

    batch = inputs.batch
    after = list(inputs.lengths)
    used: set[int] = set()
    if batch is not None and "kv" in pools:
        used = {p for row in batch.page_table.tolist() for p in row if p >= 0}
    elif batch is not None:
        for index, slot, context, start, end in sequences(batch):
            if slot >= 0 and (start < end or batch.host.accepted[index]):
                after[slot] = context + end - start
                used.add(slot)
    for name, (state, layout, pool, start) in pools.items():
        value = layout.read(pool, state, after).double().cpu()
        real = wanted[name].to(torch.float32).to(pool.dtype).double().cpu()
        share = SHARE[state.dtype] + between
        for slot in range(pool.shape[0]):
            if slot not in used:
                if not torch.equal(_bits(pool[slot]), _bits(start[slot])):
                    yield f"state {name}: slot {slot} belongs to nobody with tokens and was written"
                continue
            yield from _near(
                f"state {name} slot {slot}", value[slot].flatten()[None], real[slot].flatten()[None], share
            )
            if not torch.isfinite(value[slot]).all():
                yield f"state {name}: slot {slot} is not finite"
