"""aiter's paged attention behind our contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.batch import Batch
from hal.kernel import Site

Call = Callable[..., Any]


def decode(site: Site) -> Call:
    """Keys and values are views of the pages; a padding row attends to nothing, and gives zeros."""
    from aiter.ops.triton.attention.unified_attention import unified_attention

    op, scale = site.op, site.op.head_dim**-0.5

    def run(q: Tensor, gate: Tensor, state: tuple[Tensor], batch: Batch) -> Tensor:
        (kv,) = state
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not q.shape[0]:
            return out.flatten(1)
        real = batch.slots >= 0
        unified_attention(
            q=q, k=kv[:, 0], v=kv[:, 1], out=out, cu_seqlens_q=batch.cu_seqlens, max_seqlen_q=1,
            # of the table's width, not of lengths: a captured graph serves any
            seqused_k=torch.where(real, batch.kv_lengths, 0), max_seqlen_k=batch.page_table.shape[1] * op.page_size,
            softmax_scale=scale, causal=True, window_size=(-1, -1), block_table=batch.page_table, softcap=0.0,
            q_descale=None, k_descale=None, v_descale=None,
        )  # fmt: skip
        gated = out.float() * gate.float().sigmoid()
        return torch.where(real[:, None, None], gated, 0.0).to(q.dtype).flatten(1)

    return run
