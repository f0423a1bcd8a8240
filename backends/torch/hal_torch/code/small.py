"""Norms, activations, encoders, collectives, embedding and sampling in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from hal.batch import Batch
from hal.kernel import Site
from hal.ops.formulas import encode

Call = Callable[..., Any]


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm in float32 (float64 stays); ``offset + weight`` is formed there too."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = weight.to(wide.dtype) + offset
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale


def rms_norm(site: Site) -> Call:
    weight, eps, offset = site.weight("norm"), site.op.eps, site.op.offset
    return lambda x: normed(x, weight, eps, offset).to(x.dtype)


def add_rms_norm(site: Site) -> Call:
    weight, eps, offset = site.weight("norm"), site.op.eps, site.op.offset

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + partial
        return normed(residual, weight, eps, offset).to(residual.dtype), residual

    return run


def gated_rms_norm(site: Site) -> Call:
    weight, eps = site.weight("norm"), site.op.eps
    heads, size = site.op.value_heads, site.op.value_head_dim

    def run(x: Tensor, z: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(z.float()).unflatten(1, (heads, size))
        out: Tensor = (normed(x, weight, eps, 0.0) * gate).to(z.dtype)
        return out.flatten(1)

    return run


def silu_mul(site: Site) -> Call:
    def run(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    return run


def quantize(site: Site) -> Call:
    form, scale = site.op.out, site.scales.get("out")
    return lambda x: encode(x.float(), form, scale)


def copy(site: Site) -> Call:
    return lambda x: x.clone(memory_format=torch.contiguous_format)


def all_reduce(site: Site) -> Call:
    comm = site.runtime.comm
    return (lambda x: x.clone()) if comm is None else comm.all_reduce


def all_gather(site: Site) -> Call:
    comm = site.runtime.comm
    return (lambda x: x.clone()) if comm is None else (lambda x: torch.cat(comm.all_gather(x), 1))


def embed(site: Site) -> Call:
    weight, size = site.weight("weight"), site.op.vocab
    first = site.runtime.rank * size

    def whole(ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.nn.functional.embedding(ids, weight)
        return rows, torch.zeros_like(rows)

    def share(ids: Tensor) -> tuple[Tensor, Tensor]:
        mine = (ids >= first) & (ids < first + size)
        rows = torch.nn.functional.embedding(torch.where(mine, ids - first, 0), weight)
        rows = torch.where(mine[:, None], rows, torch.zeros_like(rows))
        return rows, torch.zeros_like(rows)

    return whole if site.op.world == 1 else share


def argmax(site: Site) -> Call:
    return lambda logits: logits.argmax(-1)


def sampled(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniform: Tensor) -> Tensor:
    """An id of each row ``[rows, vocab]``, as the row's numbers say."""
    # stable: of equal logits the lower id comes first
    ordered, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    heat = temperature[:, None]
    # differences first: a small temperature must not overflow
    p = ((ordered - ordered[:, :1]) / torch.where(heat > 0, heat, 1.0)).softmax(-1)
    place = torch.arange(p.shape[1], device=p.device)
    k = top_k[:, None]
    p = torch.where((k == 0) | (place < k), p, 0.0)
    total = p.cumsum(-1)
    p = torch.where((place == 0) | (total - p < top_p[:, None] * total[:, -1:]), p, 0.0)
    p[:, 0] = torch.where(heat[:, 0] > 0, p[:, 0], 1.0)
    total = p.cumsum(-1)
    within = (total > uniform[:, None] * total[:, -1:]) & (p > 0)
    # rounding may leave none above: then the last one that is kept
    last = (p > 0).sum(-1, keepdim=True) - 1
    at = torch.where(within.any(-1, keepdim=True), within.int().argmax(-1, keepdim=True), last)
    at = torch.where(heat > 0, at, 0)
    return ids.gather(1, at)[:, 0]


def sample(site: Site) -> Call:
    greedy = site.parts["greedy"]

    def run(logits: Tensor, batch: Batch) -> Tensor:
        if logits.shape[0] == 0:
            return batch.slots.new_zeros(0, dtype=torch.int64)
        if batch.host.greedy:
            return cast(Tensor, greedy(logits))
        return sampled(logits, batch.temperature, batch.top_p, batch.top_k, batch.uniform)

    return run
