"""Full attention and its prologue in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.batch import Batch
from hal.kernel import Site
from hal.ops.formulas import moving
from hal_torch.code.small import normed

Call = Callable[..., Any]


def qk_norm_rope(site: Site) -> Call:
    op = site.op
    q_norm, k_norm = site.weight("q_norm"), site.weight("k_norm")
    half = op.rotary_dim // 2
    widths = [2 * op.heads * op.head_dim, op.kv_heads * op.head_dim, op.kv_heads * op.head_dim]
    axes = torch.tensor([op.axis(i) for i in range(half)], device=site.runtime.place)
    # float64: a float32 angle is off by 0.01 at position 100,000
    steps = torch.arange(half, dtype=torch.float64, device=site.runtime.place)
    frequency = op.theta ** (-2 * steps / op.rotary_dim)

    def turned(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = normed(x, weight, op.eps, 1.0)
        low, high = wide[..., :half], wide[..., half : 2 * half]
        rotated = torch.cat([low * cos - high * sin, high * cos + low * sin, wide[..., 2 * half :]], -1)
        return rotated.to(x.dtype)

    def run(qkv: Tensor, state: tuple[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        rows, (kv,) = qkv.shape[0], state
        q_gate, k, v = qkv.split(widths, 1)
        q, gate = q_gate.unflatten(1, (op.heads, 2 * op.head_dim)).split(op.head_dim, -1)
        k, v = (x.unflatten(1, (op.kv_heads, op.head_dim)) for x in (k, v))
        three = batch.positions.expand(3, rows) if batch.positions.dim() == 1 else batch.positions
        angle = (three[axes].T * frequency)[:, None, :]
        cos, sin = angle.cos().float(), angle.sin().float()
        page_size, kept = kv.shape[2], batch.cells >= 0
        cells = batch.cells[kept]
        kv[cells // page_size, 0, cells % page_size] = turned(k, k_norm, cos, sin)[kept]
        kv[cells // page_size, 1, cells % page_size] = v[kept]
        return turned(q, q_norm, cos, sin), gate

    return run


def prefill(site: Site) -> Call:
    op = site.op
    group = op.heads // op.kv_heads

    def run(q: Tensor, gate: Tensor, state: tuple[Tensor], batch: Batch) -> Tensor:
        (kv,) = state
        out = q.new_zeros(q.shape[0], op.heads * op.head_dim)
        for index, _, context, start, end in moving(batch):
            total = context + end - start
            pages = batch.page_table[index, : -(-total // op.page_size)].long()
            k, v = (kv[pages, side].flatten(0, 1)[:total].transpose(0, 1) for side in (0, 1))
            seen = torch.ones(end - start, total, dtype=torch.bool, device=q.device).tril(context)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q[start:end].transpose(0, 1)[None].contiguous(),  # some kernels want 16-byte rows
                k.repeat_interleave(group, 0)[None],
                v.repeat_interleave(group, 0)[None],
                attn_mask=seen,
            )[0].transpose(0, 1)
            out[start:end] = gated(mixed, gate[start:end])
        return out

    return run


def gated(out: Tensor, gate: Tensor) -> Tensor:
    """``out * sigmoid(gate)``, heads side by side."""
    return (out.float() * gate.float().sigmoid()).to(out.dtype).flatten(1)


@dataclass(frozen=True)
class Cells:
    """Where the keys of each sequence lie: page and offset ``[sequences, longest]``, and which are real."""

    page: Tensor
    offset: Tensor
    real: Tensor


def cells(page_size: int) -> Callable[[Batch], Cells]:
    """The plan of a decode step."""

    def plan(batch: Batch) -> Cells:
        steps = torch.arange(max(batch.host.kv_lengths, default=0), device=batch.slots.device)
        real = (steps < batch.kv_lengths[:, None]) & (batch.slots >= 0)[:, None]
        if not batch.page_table.shape[1]:
            return Cells(real.long() * 0, real.long() * 0, real & False)
        page = torch.where(real, batch.page_table[:, (steps // page_size).clamp(max=batch.page_table.shape[1] - 1)], 0)
        return Cells(page.long(), (steps % page_size).expand_as(page), real)

    return plan


def decode(site: Site) -> Call:
    op = site.op
    key = site.planned(cells(op.page_size))
    group, scale = op.heads // op.kv_heads, op.head_dim**-0.5

    def run(q: Tensor, gate: Tensor, state: tuple[Tensor], batch: Batch) -> Tensor:
        where: Cells = batch.planned(key)
        (kv,) = state
        k, v = (kv[where.page, side, where.offset].float() for side in (0, 1))
        heads = q.float().unflatten(1, (op.kv_heads, group))
        scores = torch.einsum("nhgd,nlhd->nhgl", heads, k) * scale
        real = where.real[:, None, None]
        weights = torch.where(real, scores, -torch.inf).softmax(-1).nan_to_num(0.0)
        # a cell that is not real may hold anything, NaN too
        v = torch.where(where.real[..., None, None], v, 0.0)
        mixed = torch.einsum("nhgl,nlhd->nhgd", weights, v).flatten(1, 2).to(q.dtype)
        present = (batch.slots >= 0)[:, None]
        return torch.where(present, gated(mixed, gate), 0.0)

    return run
