"""FlashInfer's kernels behind our contracts: where each is refused and why, and what it is called with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from facts import device, fill
from flashinfer_double import BatchPrefillWithPagedKVCacheWrapper as Wrapper
from flashinfer_double import install

pytest.importorskip("triton")

import hal
from hal.conformance import verify_kernel
from hal.formats import Tensor as Form
from hal.ops import AddRMSNorm, AttentionPrefill, GatedDeltaUpdate, RMSNorm, SiluMul

NORM, SILU = RMSNorm(hidden=64), SiluMul(columns=64)
ATTENTION = AttentionPrefill(heads=4, kv_heads=2, head_dim=256)
DELTA = GatedDeltaUpdate(key_heads=2, value_heads=4, key_head_dim=128, value_head_dim=128)
ADD = AddRMSNorm(hidden=64)
KERNELS = {
    NORM: "cuda.flashinfer_rms_norm",
    ADD: "cuda.flashinfer_add_rms_norm",
    SILU: "cuda.flashinfer_silu_mul",
    ATTENTION: "cuda.flashinfer_prefill",
    DELTA: "cuda.flashinfer_chunk",
}
ARCHS = "sm_80 or sm_86 or sm_89 or sm_90 or sm_100 or sm_103 or sm_120 or sm_121"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> hal.Runtime:
    install(monkeypatch)
    return hal.Runtime(hal.load_device("h200"), hal.Policy(), place="cpu")


def why_not(op: Any, on: Any) -> str:
    """Why FlashInfer's kernel cannot even be forced."""
    name = next(kernel for served, kernel in KERNELS.items() if type(served) is type(op))
    rules = hal.Policy.of(force=[f"{op.title()}={name}"]).at("x")
    return hal.Resolver(hal.Registry.installed(), on).why_not(op, name, 5, rules)


def other(op: Any, **changed: Any) -> Any:
    if "dtype" in changed and hasattr(op, "out"):
        changed["out"] = Form(changed["dtype"])
    return replace(op, **changed)


ABSENT = "on h200 it is not installed (replaced by hand)"
OLD = {"flashinfer": "0.6.13"}
GATES = [
    *((op, {"flashinfer": None}, f"needs flashinfer >=0.6.13,<0.8; {ABSENT}") for op in KERNELS),
    *((op, {"flashinfer": "0.6.12"}, "needs flashinfer >=0.6.13,<0.8; h200 has 0.6.12") for op in KERNELS),
    *((op, {"flashinfer": "0.8.0"}, "needs flashinfer >=0.6.13,<0.8; h200 has 0.8.0") for op in KERNELS),
    *((op, {"cuda": "12.2"}, "needs cuda >=12.3; h200 has 12.2") for op in KERNELS),
    *((op, {"vendor": "rocm"}, "needs vendor cuda; h200 has 'rocm' (declared: replaced by hand)") for op in KERNELS),
    *(
        (op, {"arch": "sm_75"}, f"needs arch {ARCHS}; h200 has 'sm_75' (declared: replaced by hand)")
        for op in (NORM, ADD, SILU, ATTENTION)
    ),
    (DELTA, {"arch": "sm_120"}, "needs arch sm_90 or sm_100 or sm_103; h200 has 'sm_120' (declared: replaced by hand)"),
    (SILU, {"arch": "sm_103", "cuda": "12.8"}, "needs cuda >=12.9; h200 has 12.8"),
    *(
        (op, {"nvcc": None}, f"needs nvcc >=12.3; {ABSENT}, or flashinfer_jit_cache 0.7.4; h200 has none")
        for op in (SILU, ATTENTION)
    ),
    (SILU, {"nvcc": "12.0"}, "needs nvcc >=12.3; h200 has 12.0, or flashinfer_jit_cache 0.7.4; h200 has none"),
    (
        SILU,
        {"nvcc": None, "flashinfer_jit_cache": "0.7.3+cu130"},
        f"needs nvcc >=12.3; {ABSENT}, or flashinfer_jit_cache 0.7.4; h200 has 0.7.3+cu130",
    ),
    (SILU, {"nvcc": None, "flashinfer_jit_cache": "0.7.4+cu130"}, ""),
    # CuTe DSL needs no compiler, nor does what was compiled ahead
    *((op, {"nvcc": None}, "") for op in (NORM, ADD)),
    (NORM, {"cutlass_dsl": None}, ""),
    (
        NORM,
        {"nvcc": None, "cutlass_dsl": None},
        f"needs nvcc >=12.3; {ABSENT}, or flashinfer_jit_cache 0.7.4; h200 has none",
    ),
    (DELTA, {"cutlass_dsl": None}, f"needs cutlass_dsl >=4.8; {ABSENT}"),
    (DELTA, {"cutlass_dsl": "4.5.0"}, "needs cutlass_dsl >=4.8; h200 has 4.5.0"),
    (DELTA, {"flashinfer": "0.6.18", "cutlass_dsl": "4.4.2"}, "needs cutlass_dsl >=4.5; h200 has 4.4.2"),
    (DELTA, {"flashinfer": "0.6.18", "cutlass_dsl": "4.5.0"}, ""),
    (DELTA, {"nvcc": None}, ""),
    (DELTA, {**OLD, "cutlass_dsl": None}, ""),
    (
        DELTA,
        {**OLD, "nvcc": None},
        f"needs nvcc >=12.3; {ABSENT}, or flashinfer_jit_cache 0.6.13; h200 has none",
    ),
    (DELTA, {"arch": "sm_100", "cuda": "12.9"}, "needs cuda >=13; h200 has 12.9"),
    (DELTA, {**OLD, "arch": "sm_100", "nvcc": None}, ""),
]


@pytest.mark.parametrize(("op", "changed", "reason"), GATES)
def test_the_device_and_its_software_are_told_apart(op: Any, changed: dict[str, Any], reason: str) -> None:
    assert why_not(op, device("h200")) == ""
    assert why_not(op, device("h200", **changed)) == reason


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        *((other(op, dtype="float32"), "needs bfloat16 or float16; dtype is float32") for op in KERNELS),
        *((other(op, dtype="float16"), "") for op in KERNELS),
        (other(NORM, hidden=100), "needs rows of a multiple of 16 bytes; hidden takes 200"),
        (other(ADD, hidden=100), "needs rows of a multiple of 16 bytes; hidden takes 200"),
        (other(NORM, offset=0.0), ""),
        (other(NORM, offset=2.0), "needs offset 0 or 1; it is 2.0"),
        (other(ADD, world=2), "reduces over no ranks; world is 2"),
        (other(SILU, columns=20), "needs rows of a multiple of 16 bytes; columns takes 40"),
        (other(ATTENTION, head_dim=96), "needs head_dim 64, 128, 256; it is 96"),
        (other(ATTENTION, heads=3), "needs heads to be a multiple of kv_heads; they are 3 and 2"),
        (other(DELTA, decode=True), "needs whole sequences; decode is one token of each"),
        (other(DELTA, value_head_dim=64), "needs head dims of 128; key and value head dim are 128 and 64"),
        (other(DELTA, value_heads=3), "needs value_heads to be a multiple of key_heads; they are 3 and 2"),
    ],
)
def test_the_problem_is_refused_with_its_numbers(op: Any, reason: str) -> None:
    assert why_not(op, device("h200")) == reason


# what is left of each op's cases: other sizes, other formats, single tokens
SERVED = {
    RMSNorm: {"rows", "no rows", "small weight", "weight zero", "plain"},
    AddRMSNorm: {"rows", "no rows", "weight zero"},
    SiluMul: {"rows", "no rows"},
    AttentionPrefill: {"head dim 256", "head dim 256, padding"},
    GatedDeltaUpdate: {c.name for c in GatedDeltaUpdate.cases() if "128" in c.name},
}


@pytest.mark.parametrize("op", SERVED, ids=lambda op: op.title())
def test_contracts_are_kept_around_it(op: Any, runtime: hal.Runtime) -> None:
    kernel = next(name for problem, name in KERNELS.items() if type(problem) is op)
    found = list(verify_kernel(runtime, op, kernel))
    assert not [v for v in found if v.status == "failed"]
    assert {v.case for v in found if v.status == "passed"} == SERVED[op]


def bind(runtime: hal.Runtime, op: Any) -> tuple[hal.Runtime, Any]:
    """One that is forced, with the op bound to FlashInfer's kernel and filled."""
    forced = runtime.fresh(hal.Policy.of(force=[f"{op.title()}={KERNELS[op]}"]))
    bound = forced.bind(op, "it")
    fill(forced.group_of(bound))
    return forced, bound


def test_an_add_leaves_its_arguments_alone(runtime: hal.Runtime) -> None:
    _, bound = bind(runtime, ADD)
    partial, residual = (torch.randn(3, 64).bfloat16() for _ in range(2))
    before = partial.clone(), residual.clone()
    _, summed = bound(partial, residual)
    assert torch.equal(partial, before[0])
    assert torch.equal(residual, before[1])
    assert torch.equal(summed, (before[0].float() + before[1].float()).bfloat16())


def test_an_activation_takes_rows_with_others_beside_them(runtime: hal.Runtime) -> None:
    _, bound = bind(runtime, SILU)
    wide = torch.randn(3, 256).bfloat16()
    for x in (wide[:, :128], wide[:, 8:136], wide[:, 4:132], wide[1:, 128:]):
        gate, up = x.float().chunk(2, 1)
        torch.testing.assert_close(bound(x), (torch.nn.functional.silu(gate) * up).bfloat16(), rtol=0.01, atol=0.01)


def step(lengths: list[int], contexts: list[int]) -> hal.Batch:
    pages = [[3 * i + n for n in range(3)] for i in range(len(lengths))]
    return hal.make_batch("prefill", lengths, contexts, range(len(lengths)), pages=pages)


def test_a_step_is_planned_once_for_all_layers_and_again_only_if_another_came_between(runtime: hal.Runtime) -> None:
    forced = runtime.fresh(hal.Policy.of(force=[f"AttentionPrefill={KERNELS[ATTENTION]}"]))
    first, second = (forced.bind(ATTENTION, f"layers.{n}") for n in range(2))
    kv = forced.group_of(first).new_state(6)[0].normal_()
    q, gate = (torch.randn(7, 4, 256).bfloat16() for _ in range(2))
    # as many rows, so that a plan of the other would pass unnoticed
    steps = [forced.begin(step([7], [30])), forced.begin(step([3, 4], [0, 20]))]
    assert (Wrapper.made, Wrapper.planned) == (1, 2)
    plain = hal.Runtime(hal.load_device("cpu"), hal.Policy()).bind(ATTENTION, "plain")
    wanted = [plain(q, gate, (kv,), batch) for batch in steps]
    for turn, count in ((1, 2), (0, 3), (1, 4)):
        for layer in (first, second):
            torch.testing.assert_close(layer(q, gate, (kv,), steps[turn]), wanted[turn], rtol=0.03, atol=0.02)
        assert (Wrapper.made, Wrapper.planned) == (1, count)


def test_a_prefill_is_not_captured_and_says_how_it_is_launched() -> None:
    for label, backend in (("h200", "fa3"), ("b200", "fa2"), ("a100", "fa2")):
        policy = hal.Policy.of(force=[f"AttentionPrefill={KERNELS[ATTENTION]}"])
        runtime = hal.Runtime(device(label), policy, hal.Registry.installed(), load=False)
        piece = runtime.bind(ATTENTION, "it").choice.at(64)
        assert (piece.kernel.name, piece.settings["backend"]) == (KERNELS[ATTENTION], backend)
        assert not piece.captures


def test_what_is_not_measured_is_not_chosen_and_what_is_not_installed_is_not_missed() -> None:
    for version in ("0.7.4", None):
        resolver = hal.Resolver(hal.Registry.installed(), device("h200", flashinfer=version))
        for op in KERNELS:
            choice = resolver.resolve((op,))[0]
            assert choice.at(64).kernel.name.startswith("triton.")
            assert not choice.fell_back
