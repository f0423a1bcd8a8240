"""The consumer fixes the format of an edge; its producer makes it, alone or through a part that encodes."""

from typing import Any

import pytest
import torch
from facts import fake, fill, runtime, value

from hal.batch import make_batch
from hal.errors import BindError, UnresolvedError
from hal.formats import SCHEMES, STATIC_FP8, Encoded, Scheme, Tensor
from hal.layout import Ring, Shift
from hal.ops import GatedDeltaDecode, GatedDeltaPrefill, GatedMLP, Gemm, Linear
from hal.ops.base import Problem
from hal.ops.formulas import decode, encode
from hal.runtime import Group, Runtime

SIZES = {"key_heads": 2, "value_heads": 4, "key_head_dim": 16, "value_head_dim": 8}
PREFILL, DECODE = GatedDeltaPrefill(**SIZES), GatedDeltaDecode(**SIZES)
PLAIN = Linear(columns=32, rows=24)
FP8 = Linear(columns=32, rows=24, scheme=SCHEMES["fp8_tensor"])
WEIGHT_ONLY = Linear(columns=32, rows=24, scheme=Scheme(SCHEMES["fp8_tensor"].weight))
BF16 = Tensor("bfloat16")
RING, PARTS = "torch.decode_ring", "composed.gated_delta"


def layer(rt: Runtime, linear: Linear = FP8) -> tuple[Any, Group]:
    out = rt.bind(linear, "out", fed=True)
    return out, rt.bind_group(name="core", feeds=out, prefill=PREFILL, decode=DECODE)


def tree(choice) -> dict[str, str]:
    """Kernel of an op and of its parts, by dotted name."""
    return {name: found.pieces[0].kernel.name for name, found in choice.walk()}


@pytest.mark.parametrize(
    ("linear", "deny", "kernel", "form"),
    [
        (PLAIN, [], "torch.linear", BF16),
        (FP8, [], "torch.linear_quantized", STATIC_FP8),
        (FP8, ["torch.linear_quantized"], "torch.linear_widened", BF16),
        (WEIGHT_ONLY, [], "torch.linear_widened", BF16),
    ],
)
def test_the_consumer_fixes_the_format(linear: Linear, deny: list[str], kernel: str, form) -> None:
    out, core = layer(runtime(load=False, deny=deny), linear)
    assert tree(out.choice) == {"": kernel}
    assert [out.choice.op.x, *(choice.op.out for choice in core.choices.values())] == [form] * 3


def test_the_kernel_for_another_format_says_which_the_edge_has() -> None:
    out, _ = layer(runtime(load=False))
    refused = {c.kernel: (c.kind, c.reason) for c in out.choice.candidates}
    assert refused["torch.linear_widened"] == ("edge", f"takes bfloat16; the edge is {STATIC_FP8}")


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8_channel"])
def test_the_checkpoint_s_rounding_can_be_asked_for(name: str) -> None:
    linear = Linear(columns=32, rows=24, scheme=SCHEMES[name])
    portable = fake(Linear, "portable", tier="portable")  # takes x as it is, and would come first
    free, _ = layer(runtime("cpu", portable, load=False), linear)
    assert (free.choice.op.x, tree(free.choice)) == (BF16, {"": "portable"})
    out, _ = layer(runtime("cpu", portable, load=False, activations="checkpoint"), linear)
    assert (out.choice.op.x, tree(out.choice)) == (SCHEMES[name].activations, {"": "torch.linear_quantized"})
    refused = {c.kernel: (c.kind, c.reason) for c in out.choice.candidates}
    why = f"takes bfloat16; the policy wants the checkpoint's {SCHEMES[name].activations}"
    assert refused["portable"] == refused["torch.linear_widened"] == ("policy", why)


@pytest.mark.parametrize(("on", "fp4"), [("h200", False), ("mi300x", False), ("cpu", False), ("mi355x", True)])
def test_inputs_in_4_bits_stay_as_they_are_where_nothing_multiplies_4_bits(on: str, fp4: bool) -> None:
    for name in ("mxfp4", "nvfp4"):
        scheme = SCHEMES[name]
        for asked in ("device", "checkpoint"):
            rt = runtime(on, load=False, activations=asked)
            kept = fp4 or asked == "checkpoint"
            assert rt.served(scheme) == (scheme if kept else Scheme(scheme.weight))
            assert [note.split(":")[1] for note in rt.notes] == [] if kept else [f" {name} takes them as they are"]
    rt = runtime(on, load=False)
    assert rt.served(SCHEMES["fp8_block"]) == SCHEMES["fp8_block"]
    assert rt.served(None) is None
    assert not rt.notes


def test_a_kernel_that_makes_the_format_is_fed_directly() -> None:
    _, core = layer(runtime(load=False))
    assert tree(core.choices["decode"]) == {"": "torch.decode"}


@pytest.mark.parametrize(
    "policy",
    [{"force": [f"GatedDeltaDecode={RING}"]}, {"deny": ["torch.decode"]}, {"deny": ["torch.decode", PARTS]}],
)
def test_where_no_kernel_makes_it_one_more_encodes(policy) -> None:
    _, core = layer(runtime(load=False, **policy))
    assert tree(core.choices["decode"]) == {
        "": "composed.then_quantize",
        "make": RING,
        "quantize": "torch.quantize",
    }
    assert core.layouts["conv"] == Ring(4)


def test_a_core_of_parts_encodes_in_the_last_of_them() -> None:
    _, core = layer(runtime(load=False, force=[f"GatedDeltaDecode={PARTS}"]))
    assert tree(core.choices["decode"])["norm"] == "composed.then_quantize"
    assert core.layouts["conv"] == Shift()


def test_encoding_apart_shows_in_the_report() -> None:
    rt = runtime(load=False)
    layer(rt)
    assert "converts: core.prefill: torch.quantize, 96 B a row" in rt.report()


def test_a_format_that_nothing_makes_is_an_error() -> None:
    with pytest.raises(UnresolvedError, match=r"torch\.prefill \(rows 1\.\.\): makes bfloat16; the edge is float8"):
        layer(runtime(load=False, deny=["composed.then_quantize", PARTS]))


@pytest.mark.parametrize(("tier", "form"), [("fused", BF16), ("plain", STATIC_FP8)])
def test_tier_comes_first_and_format_second(tier: str, form) -> None:
    plain = fake(Linear, "z.plain", tier=tier, launches=0 if tier == "fused" else 9)
    assert layer(runtime("cpu", plain, load=False))[0].choice.op.x == form


@pytest.mark.parametrize("first", [BF16, STATIC_FP8])
def test_of_two_formats_a_kernel_gets_the_one_it_names_first(first) -> None:
    order = sorted((BF16, STATIC_FP8), key=lambda form: form != first)
    both = fake(Linear, "both", tier="fused", takes=lambda self, op: tuple(order))
    assert layer(runtime("cpu", both, load=False))[0].choice.op.x == first


def test_a_kernel_is_not_given_its_second_format_where_it_can_have_its_first() -> None:
    narrow = fake(Linear, "a.narrow", tier="fused", launches=9, takes=lambda self, op: (STATIC_FP8,))
    both = fake(Linear, "b.both", tier="fused", launches=1, takes=lambda self, op: (BF16, STATIC_FP8))
    out, _ = layer(runtime("cpu", narrow, both, load=False))
    assert (tree(out.choice), out.choice.op.x) == ({"": "b.both"}, BF16)


def test_a_part_that_is_fed_fixes_the_format_inside_a_composed_kernel() -> None:
    narrow = fake(Gemm, "narrow", tier="fused", takes=lambda self, op: (STATIC_FP8,))
    rt = runtime("cpu", narrow, load=False)
    choices = dict(rt.bind(GatedMLP(hidden=8, intermediate=8), "mlp").choice.walk())
    assert {n: choices[n].pieces[0].kernel.name for n in ("gate_up.gemm", "gate_up.act", "down")} == {
        "gate_up.gemm": "torch.gemm",
        "gate_up.act": "composed.then_quantize",
        "down": "narrow",
    }


def test_an_op_that_nothing_feeds_is_an_error_at_seal() -> None:
    rt = runtime()
    fill(rt.group_of(rt.bind(FP8, "layers.0.out", fed=True)))
    with pytest.raises(BindError, match=r"layers\.0\.out: takes float8_e4m3fn .* and is fed by nothing; bind its"):
        rt.seal()


def decoded(rt: Runtime) -> tuple[Any, Any, Group, Group]:
    """One decode step: what travels on the edge, and what comes out behind it."""
    out, core = layer(rt)
    holder = rt.group_of(out)
    fill(holder)
    fill(core)
    rt.seal()
    batch = rt.begin(make_batch("decode", [1, 1], [3, 5], [2, 0]))
    edge = core.decode(projected(), core.new_state(3), batch)
    return edge, out(edge), core, holder


def projected() -> tuple[torch.Tensor, ...]:
    widths = {"qkv": DECODE.conv_dim, "z": DECODE.value_dim, "b": 4, "a": 4}
    return tuple(value(name, (2, width), "bfloat16", deviation=3.0) for name, width in widths.items())


ROUTES = {
    "direct": {},
    "then_quantize": {"deny": ["torch.decode"]},
    "parts": {"force": [f"GatedDeltaDecode={PARTS}"]},
    "widened": {"deny": ["torch.linear_quantized"]},
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_layer_agrees_with_the_reference_on_every_route(route: str) -> None:
    edge, got, *_ = decoded(runtime(**ROUTES[route]))
    params = {p.name: value(p.name, p.shape, p.dtype, *p.init).double() for p in (*DECODE.params(), *FP8.params())}
    args = dict(zip(("qkv", "z", "b", "a"), (t.double() for t in projected()), strict=True))
    states = {s.name: torch.zeros(3, *s.shape, dtype=torch.float64) for s in DECODE.states()}
    batch = make_batch("decode", [1, 1], [3, 5], [2, 0])
    (mixed,), _ = DECODE.reference(Problem(args, params, states, batch))
    x = (
        mixed
        if route == "widened"
        else decode(encode(mixed, STATIC_FP8, params["input_scale"]), STATIC_FP8, torch.float64)
    )
    (want,), _ = FP8.reference(Problem({"x": x}, params, {}))
    assert isinstance(edge, Encoded) == (route != "widened")
    assert float((got.double() - want).abs().max()) < 0.03 * float(want.abs().max())


@pytest.mark.parametrize("route", ["direct", "then_quantize", "parts"])
def test_the_static_scale_is_the_one_in_the_consumers_storage(route: str) -> None:
    edge, _, _, holder = decoded(runtime(**ROUTES[route]))
    assert edge.scale.data_ptr() == holder.storages["input_scale"].read().data_ptr()


def test_a_reloaded_scale_is_taken_without_binding_again() -> None:
    rt = runtime()
    edge, _, core, holder = decoded(rt)
    holder.storages["input_scale"].put("input_scale", edge.scale * 2)
    again = core.decode(projected(), core.new_state(3), rt.begin(make_batch("decode", [1, 1], [3, 5], [2, 0])))
    torch.testing.assert_close(again.value.float() * 2, edge.value.float(), rtol=0.13, atol=0.1)


def test_a_scale_may_be_given_where_no_op_of_the_runtime_holds_it() -> None:
    scale = torch.tensor([0.25])
    rt = runtime()
    op = GatedDeltaDecode(**SIZES, out=STATIC_FP8)
    bound = rt.bind(op, "core", scales={"out": scale})
    fill(rt.group_of(bound))
    state = rt.group_of(bound).new_state(3)
    edge = bound(projected(), state, rt.begin(make_batch("decode", [1, 1], [3, 5], [2, 0])))
    assert edge.scale is scale
