"""The adapters that time others' kernels: called as their signatures ask, on the same problem, only where found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import hal
from hal.bench import Problem, problem
from hal.ops import AddRMSNorm, AttentionDecode, AttentionPrefill, GatedDeltaDecode, MoE, QKNormRope, RMSNorm, SiluMul

BENCH = Path(__file__).parent.parent / "bench"
# FlashInfer 0.6.13, as far as it is used
FLASHINFER = {
    "flashinfer.norm": {
        "rmsnorm": "input, weight, eps=1e-6, out=None, enable_pdl=None",
        "gemma_rmsnorm": "input, weight, eps=1e-6, out=None, enable_pdl=None",
        "fused_add_rmsnorm": "input, residual, weight, eps=1e-6, enable_pdl=None",
        "gemma_fused_add_rmsnorm": "input, residual, weight, eps=1e-6, enable_pdl=None",
    },
    "flashinfer.activation": {"silu_and_mul": "input, out=None, enable_pdl=None"},
    "flashinfer.gdn_decode": {
        "gated_delta_rule_decode_pretranspose": "q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, "
        "use_qk_l2norm=True, initial_state=None, initial_state_indices=None"
    },
}
WRAPPERS = {
    "flashinfer.decode": {
        "BatchDecodeWithPagedKVCacheWrapper": (
            "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False",
            "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
            "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, q_data_type='float16', "
            "kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None",
        )
    },
    "flashinfer.prefill": {
        "BatchPrefillWithPagedKVCacheWrapper": (
            "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False",
            "qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
            "head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', "
            "use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, "
            "rope_theta=None, q_data_type='float16', kv_data_type=None",
        )
    },
}
Given = list[tuple[str, dict[str, Any]]]


def stub(name: str, signature: str, given: Given) -> Callable[..., Any]:
    """A function with this signature that notes what it is given."""
    scope: dict[str, Any] = {"given": given}
    exec(f"def {name}({signature}):\n    given.append(({name!r}, dict(locals())))", scope)
    return scope[name]  # type: ignore[no-any-return]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module on the path of imports, with the packages around it."""
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        around = ".".join(parts[:n])
        if around not in sys.modules or n == len(parts):
            monkeypatch.setitem(sys.modules, around, ModuleType(around))
    sys.modules[name].__dict__.update(content)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``peers``, with nothing to compile and no library but those that a test makes."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(torch, "compile", lambda formula, dynamic: formula)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("flashinfer", "sglang")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("flashinfer", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    import peers

    return peers


@pytest.fixture
def given(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> Given:
    """FlashInfer's functions and wrappers as stubs; what they are given."""
    found: Given = []
    monkeypatch.delitem(sys.modules, "flashinfer")
    for name, functions in FLASHINFER.items():
        module(monkeypatch, name, **{f: stub(f, signature, found) for f, signature in functions.items()})
    for name, classes in WRAPPERS.items():
        for title, (init, plan) in classes.items():
            made = {
                "__init__": stub("init", f"self, {init}", found),
                "plan": stub("plan", f"self, {plan}", found),
                "run": stub("run", "self, q, paged_kv_cache, out=None", found),
            }
            module(monkeypatch, name, **{title: type(title, (), made)})
    return found


def made(op: Any, rows: int, **more: Any) -> tuple[Problem, str]:
    """A problem of two copies on the plain kernel that serves it."""
    runtime = hal.Runtime(hal.load_device("cpu"), hal.Policy())
    kernel = runtime.resolver.resolve((op,))[0].at(rows).kernel.name
    one = problem(runtime, op, kernel, rows, rotated=1, **more)
    return problem(runtime, op, kernel, rows, rotated=2 * one.bytes, **more), kernel


def rows_of(calls: dict[str, Any], problem: Problem) -> None:
    assert {len(each) for each in calls.values()} == {len(problem.args)} == {2}


ATTENTION = {"heads": 4, "kv_heads": 2, "head_dim": 256}
ROPE = QKNormRope(**ATTENTION, rotary_dim=64, theta=1e4, sections=(11, 11, 10))


@pytest.mark.parametrize("op", [RMSNorm(hidden=64), AddRMSNorm(hidden=64), SiluMul(columns=32), ROPE])
def test_the_formulas_that_are_compiled_are_the_op_s(op: Any, adapter: Any) -> None:
    found, _ = made(op, 3)
    if op is ROPE:
        for pools in found.states:
            pools[0].zero_()
    calls = adapter.peers(found)
    assert list(calls) == ["torch.compile"]
    rows_of(calls, found)
    for ours, theirs, pools in zip(found.calls, calls["torch.compile"], found.states, strict=True):
        wanted = ours()
        pages = [pool.clone() for pool in pools]
        for pool in pools:
            pool.zero_()
        torch.testing.assert_close(theirs(), wanted, rtol=0.02, atol=0.02)
        for pool, page in zip(pools, pages, strict=True):
            torch.testing.assert_close(pool, page, rtol=0.02, atol=0.02)


def test_what_is_not_there_has_no_row(adapter: Any) -> None:
    for op in (AttentionDecode(**ATTENTION), AttentionPrefill(**ATTENTION), MoE.cases()[0].op):
        assert adapter.peers(made(op, 3, context=5)[0]) == {}
    assert adapter.peers(SimpleNamespace(op=hal.ops.Linear.cases()[0].op)) == {}


def test_what_fails_is_a_row_of_its_own(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError("no module named tvm_ffi", name="tvm_ffi")

    monkeypatch.delitem(sys.modules, "flashinfer")
    module(monkeypatch, "flashinfer.norm")
    monkeypatch.setitem(sys.modules, "flashinfer.norm", Lacking("flashinfer.norm"))
    calls = adapter.peers(made(RMSNorm(hidden=64), 3)[0])
    calls["torch.compile"][0]()
    with pytest.raises(ModuleNotFoundError, match="tvm_ffi"):
        calls["flashinfer"][0]()


def test_norms_and_activation_are_called_on_the_problem(adapter: Any, given: Given) -> None:
    for op, name, peer in (
        (RMSNorm(hidden=64), "gemma_rmsnorm", "flashinfer"),
        (RMSNorm(hidden=64, offset=0.0), "rmsnorm", "flashinfer"),
        (AddRMSNorm(hidden=64), "gemma_fused_add_rmsnorm", "flashinfer, in place"),
        (AddRMSNorm(hidden=64, offset=0.0), "fused_add_rmsnorm", "flashinfer, in place"),
        (SiluMul(columns=32), "silu_and_mul", "flashinfer"),
    ):
        found, _ = made(op, 3)
        calls = adapter.peers(found)
        rows_of(calls, found)
        given.clear()
        for call in calls[peer]:
            call()
        assert [each[0] for each in given] == [name, name]
        for (_, arguments), args, params in zip(given, found.args, found.params, strict=True):
            if name != "silu_and_mul":
                assert (arguments["weight"], arguments["eps"]) == (params["norm"], op.eps)
            if "residual" in arguments:
                assert torch.equal(arguments["input"], args[0])
                assert torch.equal(arguments["residual"], args[1])
                # it writes over both: they are its own
                assert arguments["input"].data_ptr() != args[0].data_ptr()
                assert arguments["residual"].data_ptr() != args[1].data_ptr()
            else:
                assert arguments["input"] is args[0]


@pytest.mark.parametrize("op", [AttentionDecode(**ATTENTION), AttentionPrefill(**ATTENTION)])
def test_attention_is_planned_for_the_batch(op: Any, adapter: Any, given: Given) -> None:
    found, _ = made(op, 20, context=21)
    calls = adapter.peers(found)
    rows_of(calls, found)
    assert found.batch is not None
    plans = [arguments for name, arguments in given if name == "plan"]
    assert len(plans) == len(calls)
    lengths = found.batch.host.kv_lengths
    for plan in plans:
        assert (plan["q_data_type"], plan["kv_data_type"]) == (torch.bfloat16, torch.bfloat16)
        assert (plan["num_qo_heads"], plan["num_kv_heads"], plan["head_dim"], plan["page_size"]) == (4, 2, 256, 16)
        assert plan["sm_scale"] == 1 / 16
        assert plan.get("causal") in (None, True)
        ends, last = plan["indptr"].tolist(), plan["last_page_len"].tolist()
        for i, total in enumerate(lengths):
            assert (ends[i + 1] - ends[i] - 1) * 16 + last[i] == total
            mine = plan["indices"][ends[i] : ends[i + 1]]
            assert torch.equal(mine, found.batch.page_table[i, : len(mine)])
    given.clear()
    for each in calls.values():
        for call, args, pools in zip(each, found.args, found.states, strict=True):
            call()
            assert (given[-1][1]["q"], given[-1][1]["paged_kv_cache"]) == (args[0], pools[0])


DELTA = GatedDeltaDecode(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8)


def test_flashinfer_s_update_gets_the_pool_and_its_slots(adapter: Any, given: Given) -> None:
    found, _ = made(DELTA, 3)
    calls = adapter.peers(found)
    for call in calls["flashinfer, update alone"]:
        call()
    assert found.batch is not None
    for (_, arguments), pools in zip(given, found.states, strict=True):
        assert arguments["initial_state"] is pools[1]
        assert torch.equal(arguments["initial_state_indices"], found.batch.slots)
        assert arguments["dt_bias"].dtype == torch.float32


def conv_update(
    mixed_qkvz: Tensor, mixed_ba: Tensor, conv_state: Tensor, conv_weight: Tensor, conv_bias: Tensor | None,
    conv_state_indices: Tensor, *, qkv_dim: int, v_dim: int, num_v_heads: int, head_v_dim: int,
    activation: str | None, pad_slot_id: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """SGLang's first kernel, as its source says."""
    assert conv_bias is None
    assert activation == "silu"
    assert conv_state.shape[1:] == (qkv_dim, conv_weight.shape[1] - 1)
    qkv, z = mixed_qkvz.split([qkv_dim, v_dim], 1)
    b, a = mixed_ba.split(num_v_heads, 1)
    window = torch.cat([conv_state[conv_state_indices.long()], qkv[:, :, None]], 2)
    conv_state[conv_state_indices.long()] = window[:, :, 1:]
    mixed = torch.nn.functional.silu((window.double() * conv_weight.double()).sum(2))
    return mixed.to(qkv.dtype), z.reshape(-1, num_v_heads, head_v_dim), b, a


def packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
    out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool = False,
) -> None:  # fmt: skip
    """Its second."""
    assert use_qk_l2norm_in_kernel
    heads, wide, narrow = initial_state.shape[1:]
    q, k, v = mixed_qkv.double().split([(mixed_qkv.shape[1] - heads * wide) // 2] * 2 + [heads * wide], 1)
    q, k = (x.unflatten(1, (-1, narrow)) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    decay = (-A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())).exp()
    state = initial_state[ssm_state_indices.long()].double() * decay[..., None, None]
    error = b.double().sigmoid()[..., None] * (v.unflatten(1, (heads, wide)) - (state * k[:, :, None]).sum(-1))
    state = state + error[..., None] * k[:, :, None]
    initial_state[ssm_state_indices.long()] = state.to(initial_state.dtype)
    out.copy_((state * q[:, :, None]).sum(-1)[:, None] * scale)


def gated_norm(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6,
    group_size: int | None = None, norm_before_gate: bool = True, is_rms_norm: bool = False, activation: str = "swish",
) -> Tensor:  # fmt: skip
    """Its third."""
    assert bias is None
    assert is_rms_norm
    assert z is not None
    assert x.shape == z.shape
    wide = x.double()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return (wide * torch.nn.functional.silu(z.double())).to(x.dtype)


def test_sglang_s_core_is_the_same_work_on_state_of_its_own(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang")
    where = "sglang.kernels.ops.attention"
    module(
        monkeypatch, f"{where}.triton_gdn_fused_proj", fused_qkvzba_causal_conv1d_update_contiguous=conv_update
    )  # fmt: skip
    module(
        monkeypatch, f"{where}.fla.fused_recurrent", fused_recurrent_gated_delta_rule_packed_decode=packed_decode
    )  # fmt: skip
    module(monkeypatch, f"{where}.fla.layernorm_gated", rms_norm_gated=gated_norm)
    found, kernel = made(DELTA, 3)
    assert kernel == "torch.decode"  # whose convolution state is theirs: the last inputs, oldest first
    for pools, params in zip(found.states, found.params, strict=True):
        pools[1].mul_(3)
        assert set(params) == {p.name for p in DELTA.params()}
    calls = adapter.peers(found)
    assert list(calls) == ["sglang, whole core"]
    rows_of(calls, found)
    before = [pool.clone() for pools in found.states for pool in pools]
    theirs = calls["sglang, whole core"][0]()
    assert all(
        torch.equal(a, b) for a, b in zip(before, [p for pools in found.states for p in pools], strict=True)
    )  # fmt: skip
    torch.testing.assert_close(theirs.view(3, -1), found.calls[0](), rtol=0.03, atol=0.03)
    second = calls["sglang, whole core"][0]()
    torch.testing.assert_close(second.view(3, -1), found.calls[0](), rtol=0.03, atol=0.03)


def grouped_product(
    A: Tensor, B: Tensor, bias: Any, C: Tensor, A_scale: Any, B_scale: Any, B_zp: Any, topk_weights: Tensor,
    topk_ids: Tensor, sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor,
    mul_routed_weight: bool, top_k: int, config: dict[str, Any], compute_type: Any, use_fp8_w8a8: bool,
    use_int8_w8a8: bool, use_int8_w8a16: bool, use_int4_w4a16: bool, per_channel_quant: bool,
    block_shape: Any = None, no_combine: bool = False, a_use_tma: bool = False, b_use_tma: bool = False,
    c_sorted: bool = False, filter_expert: bool = True,
) -> None:  # fmt: skip
    """SGLang's grouped product: row ``pair // top_k`` of A with the expert of the pair's block."""
    out, block = C.view(-1, C.shape[-1]), config["BLOCK_SIZE_M"]
    assert sorted_token_ids.numel() == num_tokens_post_padded.item() == expert_ids.numel() * block
    for place, pair in enumerate(sorted_token_ids.tolist()):
        if pair < topk_ids.numel():
            row = B[expert_ids[place // block]].double() @ A[pair // top_k].double()
            out[pair] = row * (topk_weights.flatten()[pair] if mul_routed_weight else 1.0)


def act_and_mul_triton(gateup_output: Tensor, down_input: Tensor, config: dict[str, Any]) -> None:
    gate, up = gateup_output.double().chunk(2, -1)
    down_input.copy_(torch.nn.functional.silu(gate) * up)


def moe_sum_reduce_triton(input: Tensor, output: Tensor, routed_scaling_factor: float) -> None:
    output.copy_(input.double().sum(1) * routed_scaling_factor)


@pytest.mark.parametrize("tuned", [False, True])
def test_sglang_s_experts_are_the_routed_ones(
    tuned: bool, adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "sglang")
    functions = (grouped_product, act_and_mul_triton, moe_sum_reduce_triton)
    names = ("invoke_fused_moe_kernel", "act_and_mul_triton", "moe_sum_reduce_triton")
    module(
        monkeypatch, "sglang.kernels.ops.moe.fused_moe_triton_kernels",
        __file__=str(tmp_path / "kernels/ops/moe/it.py"), **dict(zip(names, functions, strict=True)),
    )  # fmt: skip
    op = MoE(hidden=32, intermediate=16, experts=6, top_k=2, shared_intermediate=24)
    if tuned:
        folder = tmp_path / "srt/layers/moe/moe_runner/triton_utils/configs/triton_3_6_0"
        folder.mkdir(parents=True)
        each = {"BLOCK_SIZE_M": 4, "USE_TMA": True}
        (folder / "E=6,N=16,device_name=.json").write_text(json.dumps({"1": {"BLOCK_SIZE_M": 1}, "8": each}))
    found, _ = made(op, 9)
    calls = adapter.peers(found)
    assert list(calls) == ["sglang, routed experts alone"]
    rows_of(calls, found)
    got, p, x = calls["sglang, routed experts alone"][1](), found.params[1], found.args[1][1].double()
    weights, chosen = (x @ p["router"].double().T).softmax(-1).topk(2)
    wanted = torch.zeros_like(x)
    for row in range(9):
        for weight, e in zip(weights[row] / weights[row].sum(), chosen[row], strict=True):
            gate, up = (p["experts_gate_up"][e].double() @ x[row]).chunk(2)
            wanted[row] += weight * (p["experts_down"][e].double() @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(got.double(), wanted, rtol=0.03, atol=0.03)


def test_launches_are_the_tuned_ones_nearest_to_the_rows(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import peers_sglang
    import triton

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    op = MoE.cases()[0].op
    folder = tmp_path / "configs" / "triton_3_6_0"
    folder.mkdir(parents=True)
    stem = f"E={op.experts},N={op.intermediate},device_name=NVIDIA_H200"
    sizes = {str(n): {"BLOCK_SIZE_M": n} for n in (16, 64)}
    (folder / f"{stem}.json").write_text(json.dumps({**sizes, "triton_version": "3.6.0"}))
    (folder / f"{stem}_down.json").write_text(json.dumps({"16": {"BLOCK_SIZE_M": 128, "num_warps": 8}}))
    (tmp_path / "configs" / "triton_3_7_1").mkdir()
    (tmp_path / "configs" / "triton_3_7_1" / f"{stem}.json").write_text(json.dumps({"1": {"BLOCK_SIZE_M": 1}}))
    for rows, block in ((1, 16), (39, 16), (41, 64), (4096, 64)):
        up, down = peers_sglang.launches(tmp_path, op, rows, "NVIDIA H200")
        # one sorting serves both
        assert (up, down) == ({"BLOCK_SIZE_M": block}, {"BLOCK_SIZE_M": block, "num_warps": 8})
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert peers_sglang.launches(tmp_path, op, 5, "NVIDIA H200")[0] == {"BLOCK_SIZE_M": 1}
    assert peers_sglang.launches(tmp_path, op, 5, "NVIDIA B200")[0]["BLOCK_SIZE_N"] == 32
    assert peers_sglang.launches(tmp_path, op, 7, "NVIDIA B200")[0]["BLOCK_SIZE_N"] == 64
