"""fla-core's kernel behind our contract, with a double in its place that demands what fla demands."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import hal
from hal.conformance import verify_kernel
from hal.ops import GatedDeltaPrefill, GatedDeltaUpdate


def double(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, initial_state: Tensor, output_final_state: bool,
    use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool, A_log: Tensor, dt_bias: Tensor, cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor, state_v_first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The delta rule token by token: ``[1, tokens, heads, dim]``, no empty sequence, state ``[n, heads, V, K]``."""
    assert use_qk_l2norm_in_kernel
    assert use_gate_in_kernel
    assert state_v_first
    assert output_final_state
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    assert (cu_seqlens.diff() > 0).all()
    assert initial_state.dtype == beta.dtype == A_log.dtype == dt_bias.dtype == torch.float32
    (tokens, heads, wide), group = v.shape[1:], v.shape[2] // k.shape[2]
    assert g.shape == beta.shape == (1, tokens, heads)
    assert initial_state.shape == (cu_seqlens.numel() - 1, heads, wide, k.shape[3])
    assert all(torch.isfinite(x).all() for x in (q, k, v, g, beta, initial_state))

    def unit(x: Tensor) -> Tensor:
        x = x.double()
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k = (unit(x[0]).repeat_interleave(group, 1) for x in (q, k))
    decay = (-A_log.double().exp() * torch.nn.functional.softplus(g[0].double() + dt_bias.double())).exp()
    out, final = torch.zeros(v.shape[1:], dtype=torch.float64), initial_state.double()
    for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        s = final[i]
        for t in range(start, end):
            s = decay[t][:, None, None] * s
            error = beta[0, t].double()[:, None] * (v[0, t].double() - (s * k[t][:, None]).sum(-1))
            s = s + error[..., None] * k[t][:, None]
            out[t] = (s * q[t][:, None]).sum(-1) * k.shape[-1] ** -0.5
        final[i] = s
    return out[None].to(v.dtype), final.float()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> hal.Runtime:
    modules = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule")}
    modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = double  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return hal.Runtime(hal.load_device("h200"), hal.Policy(), place="cpu")


def test_the_update_keeps_its_contract_around_it(runtime: hal.Runtime) -> None:
    found = {v.case: v for v in verify_kernel(runtime, GatedDeltaUpdate, "triton.fla_chunk")}
    whole = {case.name for case in GatedDeltaUpdate.cases() if not case.op.decode}
    assert {case for case, v in found.items() if v.status == "passed"} == whole
    assert not [v for v in found.values() if v.status == "failed"]
    assert found["no rows"].detail.endswith("needs whole sequences; decode is one token of each")


def test_nothing_is_copied_where_nothing_pads(runtime: hal.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def seen(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        given.extend((q, k, v))
        return double(q, k, v, **rest)

    monkeypatch.setattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", seen)
    op = GatedDeltaUpdate(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8)
    bound = runtime.bind(op, "update")
    assert bound.choice.at(5).kernel.name == "triton.fla_chunk"
    group = runtime.group_of(bound)
    for p in op.params():
        group.storages[p.memory].put(p.name, torch.zeros(p.shape, dtype=getattr(torch, p.dtype)))
    mixed = tuple(torch.randn(5, n).bfloat16() for n in (op.key_dim, op.key_dim, op.value_dim))
    gates = (torch.zeros(5, 4).bfloat16(), torch.zeros(5, 4).bfloat16())
    for slots, same in (([1, 0], True), ([1, -1], False)):
        given.clear()
        batch = runtime.begin(hal.make_batch("prefill", [3, 2], [0, 0], slots))
        out = bound(mixed, *gates, group.new_state(2), batch)
        assert [x.data_ptr() for x in given] == [x.data_ptr() for x in mixed] or not same
        assert bool(out[3:].any()) is same


def test_the_whole_core_is_composed_of_it(runtime: hal.Runtime) -> None:
    op = GatedDeltaPrefill.cases()[0].op
    choice = runtime.bind(op, "core").choice
    assert dict(choice.walk())["update"].at(9).kernel.name == "triton.fla_chunk"
