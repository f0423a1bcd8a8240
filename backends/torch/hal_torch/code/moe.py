"""Mixtures of experts in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from hal.formats import Scheme
from hal.kernel import Site
from hal.layout import Packed
from hal.ops.formulas import decode, encode, real
from hal_torch.code.linear import held

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


def quantized(site: Site) -> Call:
    """Each expert that was chosen, over its rows; the shared one over all. Products in float32."""
    norm, router, sigmoid = site.parts["norm"], site.weight("router"), site.weight("shared_sigmoid")
    experts = _Rounded(site, "experts", site.op.routed)
    shared = _Rounded(site, "shared", site.op.shared)

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = norm(partial, residual)
        weights, ids = routed(x, router, site.op.top_k)
        total = shared(x) * linear(x, sigmoid).float().sigmoid()
        for expert in ids.unique().tolist():
            row, place = (ids == expert).nonzero(as_tuple=True)
            total.index_add_(0, row, experts(x[row], expert) * weights[row, place, None])
        return total.to(x.dtype), residual

    return run


class _Rounded:
    """``down(silu(gate(x)) * up(x))`` in float32, both inputs rounded as a scheme says."""

    def __init__(self, site: Site, name: str, scheme: Scheme | None) -> None:
        self.form, self.scheme = scheme.weight if scheme else None, scheme
        names = [f"{name}_{half}" for half in ("gate_up", "down")]
        self.weights = [site.weight(n, Packed()) for n in names]
        self.scales = [held(site, f"{n}_scale") for n in names]
        self.wholes = [held(site, f"{n}_global") for n in names]
        self.inputs = [held(site, f"input_scale_{n}") for n in names]

    def __call__(self, x: Tensor, expert: int | None = None) -> Tensor:
        wide = self._product(0, x, expert).to(x.dtype)
        return self._product(1, activated(wide), expert)

    def _product(self, half: int, x: Tensor, expert: int | None) -> Tensor:
        weight, scale, whole, fixed = (
            memory if memory is None or expert is None else memory[expert]
            for memory in (self.weights[half], self.scales[half], self.wholes[half], self.inputs[half])
        )
        wide_weight: Tensor = weight
        if self.form is not None and scale is not None:
            wide_weight = real(weight, scale, self.form, torch.float32, whole)
        wide, form = x.float(), self.scheme.activations if self.scheme else None
        if form is not None:
            wide = decode(encode(wide, form, None if fixed is None else fixed.reshape(1)), form, torch.float32)
        return linear(wide, wide_weight.float())
