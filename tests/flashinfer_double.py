"""Doubles of FlashInfer's functions: its signatures, its demands as assertions, its results in float64."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

LINE = 16
HALVES = (torch.bfloat16, torch.float16)


def whole(*tensors: Tensor) -> None:
    """Rows begin at whole loads: real kernels fault where they do not."""
    for x in tensors:
        assert x.dtype in HALVES
        assert x.stride(-1) == 1
        assert x.data_ptr() % LINE == 0
        assert all(step * x.element_size() % LINE == 0 for step in x.stride()[:-1]), x.stride()
        assert x.shape[-1] * x.element_size() % LINE == 0


def _norm(offset: float) -> Any:
    def rmsnorm(
        input: Tensor,
        weight: Tensor,
        eps: float = 1e-6,
        out: Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> Tensor:
        assert out is not None
        whole(input, out)
        assert input.shape == out.shape
        assert input.shape[1] == weight.shape[0]
        # the compiled code reads the weight as if it were of this dtype
        assert weight.dtype == input.dtype == out.dtype
        assert enable_pdl is not None
        x = input.double()
        return out.copy_(x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + offset))

    return rmsnorm


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    assert out is not None
    whole(input, out)
    assert input.is_contiguous()
    assert enable_pdl is not None
    gate, up = input.double().chunk(2, -1)
    return out.copy_(gate * gate.sigmoid() * up)


class BatchPrefillWithPagedKVCacheWrapper:
    """Holds one plan, as the real one does."""

    made = planned = 0

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None, custom_mask_buf: Any = None, mask_indptr_buf: Any = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None,
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD"
        assert backend == "fa3"
        assert not use_cuda_graph
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any()
        type(self).made += 1

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: Any = None,
        custom_mask: Any = None, packed_custom_mask: Any = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: Any = None, rope_scale: Any = None, rope_theta: Any = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, o_data_type: Any = None, non_blocking: bool = True,
    ) -> None:  # fmt: skip
        type(self).planned += 1
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32
        assert not any(x.is_cuda for x in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len))
        assert (qo_indptr.diff() > 0).all()
        assert (paged_kv_indptr.diff() > 0).all()
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert paged_kv_indices.shape[0] == paged_kv_indptr[-1]
        assert causal
        assert sm_scale == pytest.approx(head_dim_qk**-0.5)
        assert head_dim_qk in (64, 128, 256)
        self.given = (qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices.tolist())
        self.last, self.heads, self.size = paged_kv_last_page_len.tolist(), (num_qo_heads, num_kv_heads), page_size
        self.kinds, self.scale = (q_data_type, kv_data_type), sm_scale

    def run(
        self, q: Tensor, paged_kv_cache: Tensor, *args: Any, q_scale: Any = None, k_scale: Any = None,
        v_scale: Any = None, out: Tensor | None = None, lse: Any = None, return_lse: bool = False,
        enable_pdl: bool | None = None, window_left: Any = None, sinks: Any = None,
    ) -> Tensor:  # fmt: skip
        whole(q)
        assert out is not None
        assert out.shape == q.shape
        assert (q.dtype, paged_kv_cache.dtype) == self.kinds
        assert q.shape[1] == self.heads[0]
        assert paged_kv_cache.shape[1:4] == (2, self.size, self.heads[1])
        rows, pages, indices = self.given
        # a plan of another batch would not be noticed there where the rows are as many
        assert q.shape[0] == rows[-1]
        group = self.heads[0] // self.heads[1]
        for i, last in enumerate(self.last):
            taken = indices[pages[i] : pages[i + 1]]
            total = (len(taken) - 1) * self.size + last
            k, v = (paged_kv_cache[taken, side].flatten(0, 1)[:total].double() for side in (0, 1))
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            mine = q[rows[i] : rows[i + 1]].double()
            seen = torch.ones(mine.shape[0], total, dtype=torch.bool).tril(total - mine.shape[0])
            scores = torch.einsum("qhd,khd->hqk", mine, k) * self.scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[rows[i] : rows[i + 1]] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False, output: Tensor | None = None, output_state: Tensor | None = None,
    state_checkpoints: Any = None, checkpoint_cu_starts: Any = None, checkpoint_every_n_tokens: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token; the flag that asks for norms does nothing, as on Hopper in 0.6.13."""
    assert g is not None
    assert beta is not None
    assert initial_state is not None
    assert cu_seqlens is not None
    assert output_final_state
    whole(q, k, v)
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, initial_state))
    (tokens, heads, wide), group = v.shape, v.shape[1] // k.shape[1]
    assert q.shape == k.shape
    assert q.shape[2] == wide == 128
    assert g.shape == beta.shape == (tokens, heads)
    assert g.dtype == beta.dtype == initial_state.dtype == torch.float32
    # decays, whose logarithms are finite where small numbers are flushed to zero too
    assert ((g >= torch.finfo(torch.float32).tiny) & (g <= 1)).all()
    assert initial_state.shape == (cu_seqlens.shape[0] - 1, heads, wide, wide)
    assert all(torch.isfinite(x).all() for x in (q, k, v, beta, initial_state))
    out, final = torch.zeros(v.shape, dtype=torch.float64), initial_state.double()
    q, k = (x.double().repeat_interleave(group, 1) for x in (q, k))
    for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        s = final[i]
        for t in range(start, end):
            s = g[t].double()[:, None, None] * s
            error = beta[t].double()[:, None] * (v[t].double() - (s * k[t][:, None]).sum(-1))
            s = s + error[..., None] * k[t][:, None]
            out[t] = (s * q[t][:, None]).sum(-1) * scale
        final[i] = s
    return out.to(v.dtype), final.float()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand where the package would."""
    found = {
        "flashinfer": {},
        "flashinfer.norm": {"rmsnorm": _norm(0.0), "gemma_rmsnorm": _norm(1.0)},
        "flashinfer.activation": {"silu_and_mul": silu_and_mul},
        "flashinfer.prefill": {"BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper},
        "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    }
    for name, content in found.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "made", 0)
    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "planned", 0)
