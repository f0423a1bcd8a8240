"""aiter's mixture of experts behind our contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from hal.kernel import Site
from hal.layout import Packed

Call = Callable[..., Any]


def fused(site: Site) -> Call:
    from aiter.fused_moe import fused_moe

    op, norm, router, sigmoid = site.op, site.parts["norm"], site.weight("router"), site.weight("shared_sigmoid")
    gate_up, down = site.weight("experts_gate_up"), site.weight("experts_down")
    shared_gate_up, shared_down = site.weight("shared_gate_up", Packed()), site.weight("shared_down")
    most = site.settings["rows"]
    for weight in (gate_up, down):
        weight.is_shuffled = True  # which newer versions ask, and older ones take for granted

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = norm(partial, residual)
        if not x.shape[0]:
            return torch.empty_like(x), residual
        # stable: of equal logits the lower expert comes first
        weights, ids = linear(x, router).float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights, ids = weights[:, : op.top_k], ids[:, : op.top_k].to(torch.int32)
        weights = weights / weights.sum(-1, keepdim=True)
        several = zip(*(t.split(most) for t in (x, weights, ids)), strict=True)
        routed = torch.cat(
            [fused_moe(hidden_states=h, w1=gate_up, w2=down, topk_weight=w, topk_ids=i) for h, w, i in several]
        )
        gate, up = linear(x, shared_gate_up).float().chunk(2, -1)
        shared = linear((silu(gate) * up).to(x.dtype), shared_down).float()
        total = routed.float() + shared * linear(x, sigmoid).float().sigmoid()
        return total.to(x.dtype), residual

    return run
