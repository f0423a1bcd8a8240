"""Mixtures of experts in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from hal.kernel import Site
from hal.layout import Packed

Call = Callable[..., Any]


def routed(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights (float32, sum 1) and ids of the experts of each row; the lower id wins a tie."""
    weights, ids = linear(x, router).float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    return weights / weights.sum(-1, keepdim=True), ids


def activated(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of both halves of the last axis, in float32."""
    gate, up = gate_up.float().chunk(2, -1)
    return (silu(gate) * up).to(gate_up.dtype)


def _moe(site: Site, experts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
    norm, router, top_k = site.parts["norm"], site.weight("router"), site.op.top_k
    gate_up, down = site.weight("shared_gate_up", Packed()), site.weight("shared_down")
    sigmoid = site.weight("shared_sigmoid")

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = norm(partial, residual)
        weights, ids = routed(x, router, top_k)
        shared = linear(activated(linear(x, gate_up)), down)
        total = experts(x, weights, ids) + shared.float() * linear(x, sigmoid).float().sigmoid()
        return total.to(x.dtype), residual

    return run


def gathered(site: Site) -> Call:
    """The chosen experts' weights copied together, then batched products."""
    gate_up, down = site.weight("experts_gate_up"), site.weight("experts_down")

    def experts(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        wide = torch.einsum("rkih,rh->rki", gate_up[ids], x)
        each = torch.einsum("rkhi,rki->rkh", down[ids], activated(wide)).float()
        return (each * weights[..., None]).sum(1)

    return _moe(site, experts)


def by_expert(site: Site) -> Call:
    """Each expert that was chosen, over its rows."""
    gate_up, down = site.weight("experts_gate_up"), site.weight("experts_down")

    def experts(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            row, place = (ids == expert).nonzero(as_tuple=True)
            value = linear(activated(linear(x[row], gate_up[expert])), down[expert])
            out.index_add_(0, row, value.float() * weights[row, place, None])
        return out

    return _moe(site, experts)
