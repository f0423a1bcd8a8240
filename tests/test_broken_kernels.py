"""A kernel that is wrong in one way fails a case of its op, with what is wrong in the verdict."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from facts import fake, registry
from hal_torch.code import gated_delta

from hal.backend import load_target
from hal.conformance import verify_kernel
from hal.device import load_device
from hal.kernel import Kernel
from hal.numerics import EXACT, REASSOCIATED
from hal.ops import (
    AttentionDecode,
    Copy,
    Embed,
    GatedDeltaDecode,
    GatedDeltaPrefill,
    GatedDeltaUpdate,
    Quantize,
    SiluMul,
)
from hal.policy import Policy
from hal.runtime import Runtime

Spoil = Callable[..., Any]


def spoiled(op: type, code: str, spoil: Spoil, **declared: Any) -> type[Kernel]:
    """The torch kernel, called by ``spoil(call, *args)``."""

    def load(self: Kernel, site: Any) -> Any:
        call = load_target(f"hal_torch.code.{code}")(site)
        return lambda *args: spoil(call, *args)

    return fake(op, "broken", load=load, **declared)


def failed(kernel: type[Kernel]) -> dict[str, str]:
    """Cases that it fails, and how."""
    (op,) = kernel.serves
    rt = Runtime(load_device("cpu"), Policy(), registry(kernel), load=False)
    found = list(verify_kernel(rt, op, "broken"))
    assert {v.status for v in found} != {"refused"}
    return {v.case: v.detail for v in found if v.status == "failed"}


def after(change: Callable[[Any, tuple[Any, ...]], Any]) -> Spoil:
    """Change the result, or the state, after a right call."""

    def spoil(call: Any, *args: Any) -> Any:
        out = call(*args)
        changed = change(out, args)
        return out if changed is None else changed

    return spoil


def rolled(out: Any, args: tuple[Any, ...]) -> None:
    """All states, one slot too far."""
    for pool in args[-2]:
        pool.copy_(pool.roll(1, 0))


def unused(out: Any, args: tuple[Any, ...]) -> None:
    args[-2][-1][-1] = 0.0


def emptied(out: Any, args: tuple[Any, ...]) -> None:
    """The slots of sequences of no tokens that begin."""
    host = args[-1].host
    for slot, context, length in zip(host.slots, host.contexts, host.lengths, strict=True):
        if not context and not length:
            args[-2][-1][slot] = 0.0


def first(out: Any, args: tuple[Any, ...]) -> None:
    args[-2][0][0] = 0.0


def filled(out: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    return out.masked_fill(args[-1].padding.view(-1, *[1] * (out.dim() - 1)), 0.001)


def noisy(out: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    return torch.where(torch.rand_like(out, dtype=torch.float32) < 0.5, out, out * 1.004)


def crowded(out: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    return out * 1.004 if out.shape[0] > 1 else out


def tiled(call: Any, q: torch.Tensor, gate: torch.Tensor, state: Any, batch: Any) -> torch.Tensor:
    """Head h reads KV head h mod kv_heads, where it should read h // group."""
    heads, kv_heads = q.shape[1], state[0].shape[3]
    order = torch.arange(heads).view(-1, kv_heads).T.flatten()
    out = call(q[:, order], gate[:, order], state, batch).unflatten(1, (heads, -1))
    return out[:, order.argsort()].flatten(1)


def swapped(call: Any, q: torch.Tensor, gate: torch.Tensor, state: Any, batch: Any) -> torch.Tensor:
    return call(q, gate, (state[0].flip(1),), batch)


def transposed(call: Any, qkv: Any, b: Any, a: Any, state: Any, batch: Any) -> torch.Tensor:
    """The state as [K, V] wherever its shape does not tell."""
    (pool,) = state
    square = pool.shape[-1] == pool.shape[-2]
    return call(qkv, b, a, (pool.transpose(-1, -2) if square else pool,), batch)


def dense(call: Any, x: torch.Tensor) -> torch.Tensor:
    return call(x.as_strided(x.shape, (x.shape[1], 1)))


def crossed(call: Any, qkv: Any, b: Any, a: Any, state: Any, batch: Any) -> torch.Tensor:
    return call(qkv, a, b, state, batch)


def negated(out: Any, args: tuple[Any, ...]) -> Any:
    return out._replace(value=(-out.value.float()).to(out.value.dtype))


DECODE, ATTENTION, UPDATE = "gated_delta:decode", "attention:decode", "gated_delta:delta_update"
BROKEN: dict[str, tuple[type[Kernel], str, str]] = {
    "state one slot off": (spoiled(GatedDeltaDecode, DECODE, after(rolled)), "ratio 1, K 16, V 16", "state"),
    "unused slot": (spoiled(GatedDeltaDecode, DECODE, after(unused)), "padding", "slot 7 belongs to nobody"),
    "slot without tokens": (
        spoiled(GatedDeltaPrefill, "gated_delta:prefill", after(emptied)),
        "float32",
        "slot 0 belongs to nobody with tokens",
    ),
    "unused page": (
        spoiled(AttentionDecode, ATTENTION, after(first)),
        "rows",
        "belongs to nobody with tokens and was written",
    ),
    "padding not zero": (spoiled(GatedDeltaPrefill, "gated_delta:prefill", after(filled)), "padding", "exactly zero"),
    "padding of decode": (spoiled(AttentionDecode, ATTENTION, after(filled)), "padding", "must be exactly zero"),
    "heads tiled": (spoiled(AttentionDecode, ATTENTION, tiled), "rows", "value: off by"),
    "K for V": (spoiled(AttentionDecode, ATTENTION, swapped), "rows", "value: off by"),
    "state transposed": (spoiled(GatedDeltaUpdate, UPDATE, transposed), "ratio 1, K 16, V 16", "off by"),
    "a for b": (spoiled(GatedDeltaUpdate, UPDATE, crossed), "ragged", "value: off by"),
    "other bits": (spoiled(SiluMul, "small:silu_mul", after(noisy)), "rows", "claims to be deterministic"),
    "other bits in company": (
        spoiled(SiluMul, "small:silu_mul", after(crowded), numerics=replace(REASSOCIATED, batch_invariant=True)),
        "rows",
        "claims to be batch invariant",
    ),
    "strides": (spoiled(SiluMul, "small:silu_mul", dense), "rows", "value"),
    "dtype": (spoiled(SiluMul, "small:silu_mul", after(lambda y, _: y.float())), "rows", "got torch.float32"),
    "shape": (
        spoiled(SiluMul, "small:silu_mul", after(lambda y, _: y[:, 1:])),
        "rows",
        "expected [5, 48], got [5, 47]",
    ),
    "raises": (spoiled(SiluMul, "small:silu_mul", lambda call, x: call(x, x)), "rows", "raised TypeError"),
    "results": (spoiled(Embed, "small:embed", after(lambda y, _: y[0])), "rows", "gave 1 results, the signature has 2"),
    "rounds": (
        spoiled(Copy, "small:copy", after(lambda y, _: y.bfloat16().to(y.dtype)), numerics=EXACT),
        "float32",
        "claims EXACT and differs",
    ),
    "wrong sign": (
        spoiled(Quantize, "small:quantize", after(negated), numerics=EXACT, makes=lambda self, op: (op.out,)),
        "fp8, large",
        "claims EXACT and differs",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_fails(name: str) -> None:
    kernel, case, says = BROKEN[name]
    assert says in failed(kernel)[case]


def stale(self: Kernel, site: Any) -> Any:
    """The first token of a sequence takes what its slot holds: no context is 0."""
    key = site.planned(lambda batch: replace(gated_delta.one_each(batch), contexts=batch.contexts.clamp(min=9)))
    return gated_delta._core(site, lambda batch: batch.planned(key))


def test_state_that_is_not_zeroed_for_a_fresh_sequence_fails() -> None:
    found = failed(fake(GatedDeltaDecode, "broken", load=stale))
    assert "state conv slot 1" in found["first token"]
    assert "state delta slot 1" in found["first token"]


def test_a_kernel_that_fails_to_load_fails() -> None:
    found = failed(fake(SiluMul, "broken", code="no_such:silu"))
    assert "raised BindError: rows: broken was chosen and failed to load" in found["rows"]


def test_a_right_kernel_in_the_same_wrapping_passes() -> None:
    assert failed(spoiled(GatedDeltaDecode, DECODE, after(lambda out, args: None))) == {}
