"""A call of what was bound is a call of its kernel: pieces by rows, plans once a step, equal numbers."""

import sys
from types import CodeType
from typing import Any

import pytest
import torch
from facts import fake, fill, runtime, value

from hal.batch import make_batch
from hal.errors import HalError
from hal.kernel import Kernel, Part
from hal.layout import Padded
from hal.ops import GatedDeltaDecode, GatedDeltaPrefill, Gemm, InProj, Linear, MoE, Projection, SiluMul

ODD = InProj(hidden=16, parts=(Projection("q", 30, "qk"), Projection("k", 6, "qk"), Projection("b", 3, "b")))
EXPERTS = MoE(hidden=16, intermediate=8, experts=4, top_k=2, shared_intermediate=8)
SILU = SiluMul(columns=8)
SIZES = {"key_heads": 2, "value_heads": 4, "key_head_dim": 16, "value_head_dim": 8}
DECODE, PREFILL = GatedDeltaDecode(**SIZES), GatedDeltaPrefill(**SIZES)


def caller(*_: Any) -> CodeType:
    """A kernel that gives the code that called it."""
    return sys._getframe(1).f_code


def projected(rows: int, on="h200", **policy) -> tuple[Any, list[torch.Tensor]]:
    rt = runtime(on, **policy)
    bound = rt.bind(ODD, "in_proj")
    fill(rt.group_of(bound))
    partial, residual = (value(n, (rows, 16), "bfloat16") for n in ("partial", "residual"))
    (qk, b), summed = bound(partial, residual)
    return bound, [qk, b, summed]


ROUTES = {
    "padded": ("h200", {}, "padded:8", ["torch.padded", "torch.separate"]),
    "separate": ("h200", {"deny": ["torch.padded"]}, "separate", ["torch.separate"]),
    "packed": ("cpu", {}, "packed", ["torch.packed"]),
    "separate on packed": ("cpu", {"force": ["InProj=torch.separate"]}, "packed", ["torch.separate"]),
}


@pytest.mark.parametrize("rows", [0, 1, 5, 1024, 1025])
@pytest.mark.parametrize("route", ROUTES)
def test_an_input_projection_gives_the_same_numbers_in_every_layout(route: str, rows: int) -> None:
    on, policy, layout, kernels = ROUTES[route]
    bound, got = projected(rows, on, **policy)
    assert (str(bound.choice.layouts["weight"]), [p.kernel.name for p in bound.choice.pieces]) == (layout, kernels)
    _, want = projected(rows, "cpu")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


def test_rows_beyond_the_padded_ones_read_the_padded_memory_part_by_part() -> None:
    rt = runtime("h200")
    storage = rt.group_of(rt.bind(ODD, "in_proj")).storages["weight"]
    assert storage.layout == Padded(8)
    assert {n: b.shape for n, b in storage.buffers.items()} == {"packed": (40, 16)}


@pytest.mark.parametrize(
    ("rows", "kernel"), [(0, "few"), (1, "few"), (4, "few"), (5, "more"), (9, "more"), (10, "rest"), (99, "rest")]
)
def test_the_rows_of_a_call_pick_the_kernel(rows: int, kernel: str) -> None:
    kinds = [("few", (1, 4)), ("more", (3, 9)), ("rest", (1, None))]
    tiers = {"few": "fused", "more": "library", "rest": "portable"}
    found = [fake(SiluMul, n, lambda x, n=n: n, tier=tiers[n], rows=rows) for n, rows in kinds]
    bound = runtime("cpu", *found).bind(SILU, "act")
    assert bound(torch.empty(rows, 16)) == kernel
    assert bound.at(rows)(torch.empty(1, 16)) == kernel
    assert bound.choice.at(rows).kernel.name == kernel


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 40])
def test_both_kernels_for_experts_give_the_same_numbers(rows: int) -> None:
    rt = runtime()
    bound = rt.bind(EXPERTS, "moe")
    fill(rt.group_of(bound))
    args = [value(n, (rows, 16), "bfloat16") for n in ("partial", "residual")]
    first, second = (bound.at(n)(*args) for n in (1, 5))
    for a, b, c in zip(first, second, bound(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)
        assert torch.equal(c, a if rows <= 4 else b)


def test_calling_a_bound_op_is_calling_its_kernel() -> None:
    bound = runtime("cpu", fake(SiluMul, "caller", caller, tier="fused")).bind(SILU, "act")
    here = sys._getframe().f_code
    assert bound(None) is here
    assert bound.at(1)(None) is here


def test_with_pieces_there_is_one_frame_and_none_through_at() -> None:
    few = fake(SiluMul, "few", caller, tier="fused", rows=(1, 4))
    bound = runtime("cpu", few).bind(SILU, "act")
    assert bound(torch.empty(2, 16)).co_name == "pick"
    assert bound.at(2)(None) is sys._getframe().f_code


def test_the_parts_of_a_composed_kernel_are_called_without_a_frame() -> None:
    class Whole(Kernel):
        tier, parts = "fused", lambda self, op: {"gemm": Part(Gemm(columns=8, rows=8))}
        load = lambda self, site: lambda x: (site.parts["gemm"](x), sys._getframe().f_code)

    whole = fake(Linear, "whole", **{n: vars(Whole)[n] for n in ("tier", "parts", "load")})
    rt = runtime("cpu", whole, fake(Gemm, "caller", caller, tier="fused"))
    called_by, code = rt.bind(Linear(columns=8, rows=8), "out")(None)
    assert called_by is code


def planning(name: str, op, seen: list[str]) -> type[Kernel]:
    def load(self: Kernel, site) -> Any:
        key = site.planned(lambda batch: seen.append(name) or f"plan of {name}")
        return lambda projected, state, batch: batch.planned(key)

    return fake(type(op), name, tier="fused", load=load)


def test_a_plan_runs_once_a_step_for_all_layers_and_only_in_its_mode() -> None:
    seen: list[str] = []
    rt = runtime("cpu", planning("d", DECODE, seen), planning("p", PREFILL, seen))
    layers = [rt.bind_group(name=f"layers.{i}", prefill=PREFILL, decode=DECODE) for i in range(3)]
    other = rt.bind(GatedDeltaDecode(**SIZES, eps=1e-5), "other")
    for mode, plans in (("decode", ["d", "d"]), ("prefill", ["p"]), ("decode", ["d", "d"]), ("verify", [])):
        seen.clear()
        batch = rt.begin(make_batch(mode, [1], [3], [0]))
        assert seen == plans
        if mode == "decode":
            assert {layer.decode(None, None, batch) for layer in layers} == {"plan of d"}
            assert other(None, None, batch) == "plan of d"
            assert seen == plans


def test_a_batch_that_was_not_begun_is_an_error() -> None:
    bound = runtime("cpu", planning("d", DECODE, [])).bind(DECODE, "core")
    with pytest.raises(HalError, match=r"its plan did not see this batch; call runtime\.begin\(batch\) each step"):
        bound(None, None, make_batch("decode", [1], [3], [0]))
