"""Gated DeltaNet in torch: chunked for sequences, one step for single tokens; all sums in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.batch import Batch
from hal.formats import Quantized
from hal.kernel import Site
from hal.layout import KV, Layout, Packed, Ring
from hal.ops.formulas import encode
from hal.ops.gated_delta import DeltaSizes
from hal_torch.code.small import normed

Call = Callable[..., Any]
CHUNK = 64


@dataclass(frozen=True)
class Grid:
    """Sequences side by side: where each token of ``[sequences, longest]`` lies, and what is real."""

    index: Tensor  # [sequences, longest] row of each token
    real: Tensor  # [sequences, longest] bool
    lengths: Tensor  # [sequences]
    slots: Tensor  # [sequences], of live sequences
    live: Tensor  # [live] which sequences have a slot and tokens
    contexts: Tensor  # [sequences]
    rows: int

    def spread(self, x: Tensor) -> Tensor:
        """``[rows, ...]`` to ``[sequences, longest, ...]`` in float32, zero where nothing is real."""
        mask = self.real.reshape(*self.real.shape, *(1,) * (x.dim() - 1))
        return torch.where(mask, x[self.index].float(), 0.0)

    def collect(self, x: Tensor) -> Tensor:
        """Back to ``[rows, ...]``; rows of padding are zero."""
        out = x.new_zeros(self.rows, *x.shape[2:])
        out[self.index[self.real]] = x[self.real]
        return out


def grid(batch: Batch) -> Grid:
    """The plan of a prefill step."""
    starts, ends = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    lengths = torch.where(batch.slots >= 0, ends - starts, 0)
    steps = torch.arange(max(batch.host.lengths, default=0), device=lengths.device)
    real = steps < lengths[:, None]
    live = lengths.nonzero()[:, 0]
    index = torch.where(real, starts[:, None] + steps, 0)
    return Grid(index, real, lengths, batch.slots[live].long(), live, batch.contexts.long(), batch.host.tokens)


def one_each(batch: Batch) -> Grid:
    """The same for a decode step: a token a sequence."""
    rows = torch.arange(len(batch.host.slots), device=batch.slots.device)
    real = batch.slots >= 0
    live = real.nonzero()[:, 0]
    return Grid(
        rows[:, None],
        real[:, None],
        real.long(),
        batch.slots[live].long(),
        live,
        batch.contexts.long(),
        rows.numel(),
    )


def recent(pool: Tensor, g: Grid, layout: Layout, kept: int) -> Tensor:
    """The last ``kept`` inputs before this step ``[live, kept, channels]``, zero before the start."""
    contexts = g.contexts[g.live]
    position = contexts[:, None] + torch.arange(-kept, 0, device=pool.device)
    if isinstance(layout, Ring):
        place = position % pool.shape[2]
        found = pool[g.slots[:, None], :, place].float()
    else:
        found = pool[g.slots].transpose(1, 2).float()
    return torch.where((position >= 0)[..., None], found, 0.0)


def remember(pool: Tensor, g: Grid, layout: Layout, window: Tensor) -> None:
    """Write the last inputs ``[live, kept, channels]`` back to their slots."""
    kept = window.shape[1]
    if not isinstance(layout, Ring):
        pool[g.slots] = window.transpose(1, 2).to(pool.dtype)
        return
    position = (g.contexts + g.lengths)[g.live, None] + torch.arange(-kept, 0, device=pool.device)
    row, column = (position >= 0).nonzero(as_tuple=True)
    pool[g.slots[row], :, position[row, column] % pool.shape[2]] = window[row, column].to(pool.dtype)


def convolved(x: Tensor, pool: Tensor, weight: Tensor, g: Grid, layout: Layout) -> Tensor:
    """Causal convolution with SiLU ``[live, longest, channels]``; the pool moves on."""
    kept = weight.shape[1] - 1
    series = torch.cat([recent(pool, g, layout, kept), g.spread(x)[g.live]], 1)
    length = series.shape[1] - kept
    taps = weight.float().T
    out = sum((series[:, j : j + length] * taps[j] for j in range(kept + 1)), torch.zeros(()))
    last = g.lengths[g.live, None] + torch.arange(kept, device=x.device)
    remember(pool, g, layout, series.gather(1, last[..., None].expand(-1, -1, series.shape[2])))
    return torch.nn.functional.silu(out)


def unit(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)``."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def ruled(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, pool: Tensor, g: Grid, op: DeltaSizes
) -> Tensor:
    """The delta rule over ``[live, longest, ...]``; gives o ``[live, longest, value_heads, V]``.

    ``pool`` is ``[slots, value_heads, V, K]`` (any strides) and moves on. Heads are kept as
    ``[key_heads, value heads of each]``, so that keys are never repeated.
    """
    count, length = qkv.shape[:2]
    group = op.value_heads // op.key_heads
    q, k, v = qkv.split(op.widths, -1)
    q = unit(q.view(count, length, op.key_heads, 1, op.key_head_dim)).permute(0, 2, 3, 1, 4) * op.key_head_dim**-0.5
    k = unit(k.view(count, length, op.key_heads, 1, op.key_head_dim)).permute(0, 2, 3, 1, 4)
    v = v.view(count, length, op.key_heads, group, op.value_head_dim).permute(0, 2, 3, 1, 4)
    beta = b.sigmoid().view(count, length, op.key_heads, group).permute(0, 2, 3, 1)
    log_decay = -a_log.float().exp() * torch.nn.functional.softplus(a + dt_bias.float())
    real = g.real[g.live]
    log_decay = torch.where(real[..., None], log_decay, 0.0)
    log_decay = log_decay.view(count, length, op.key_heads, group).permute(0, 2, 3, 1)
    beta = torch.where(real[:, None, None], beta, 0.0)
    fresh = (g.contexts[g.live] == 0)[:, None, None, None]
    state = torch.where(fresh, 0.0, pool[g.slots].float())
    state = state.view(count, op.key_heads, group, op.value_head_dim, op.key_head_dim)
    chunks = []
    for at in range(0, length, CHUNK):
        cut = slice(at, at + CHUNK)
        out, state = chunk(q[..., cut, :], k[..., cut, :], v[..., cut, :], beta[..., cut], log_decay[..., cut], state)
        chunks.append(out)
    pool[g.slots] = state.flatten(1, 2).to(pool.dtype)
    out = torch.cat(chunks, 3) if chunks else v
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def chunk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Up to 64 tokens at once; sequences, key heads and groups lead every shape.

    With G the cumulated log decay, every exponential is of a difference that is 0 or less.
    The errors e solve (1 + A) e = beta (v - exp(G) S k), A_ij = beta_i exp(G_i - G_j) k_i k_j, j < i.
    """
    total = log_decay.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    lower = torch.ones(between.shape[-2:], dtype=torch.bool, device=q.device).tril()
    decay = torch.where(lower, between, -torch.inf).exp()
    since = total.exp()[..., None]
    if q.shape[-2] == 1:
        error = beta[..., None] * (v - since * (k @ state.transpose(-1, -2)))
    else:
        mixed = (k @ k.transpose(-1, -2)) * decay * beta[..., None]
        right = beta[..., None] * (v - since * (k @ state.transpose(-1, -2)))
        error = torch.linalg.solve_triangular(mixed.tril(-1), right, upper=False, unitriangular=True)
    out = since * (q @ state.transpose(-1, -2)) + ((q @ k.transpose(-1, -2)) * decay) @ error
    to_end = (total[..., -1:] - total).exp()[..., None]
    state = total[..., -1].exp()[..., None, None] * state + (error * to_end).transpose(-1, -2) @ k
    return out, state


def vk(pool: Tensor, layout: Layout) -> Tensor:
    """The pool as ``[slots, value_heads, V, K]``, a view."""
    return pool.transpose(-1, -2) if isinstance(layout, KV) else pool


def _core(site: Site, where: Callable[[Batch], Grid]) -> Call:
    op = site.op
    weight, norm = site.weight("conv_weight", Packed()), site.weight("norm")
    a_log, dt_bias = site.weight("A_log"), site.weight("dt_bias")
    conv_layout, delta_layout = site.layouts["conv"], site.layouts["delta"]
    kind = getattr(torch, op.dtype)

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor], batch: Batch) -> Any:
        qkv, z, b, a = projected
        g = where(batch)
        x = convolved(qkv, state[0], weight, g, conv_layout)
        ba = (g.spread(b)[g.live], g.spread(a)[g.live])
        o = ruled(x, *ba, a_log, dt_bias, vk(state[1], delta_layout), g, op)
        gate = torch.nn.functional.silu(g.spread(z)[g.live]).unflatten(-1, (op.value_heads, -1))
        spread = x.new_zeros(*g.real.shape, op.value_dim)
        spread[g.live] = (normed(o, norm, op.eps, 0.0) * gate).flatten(2)
        out = g.collect(spread)
        if isinstance(op.out, Quantized):
            return encode(out.to(kind).float(), op.out, site.scales["out"])
        return out.to(kind)

    return run


def prefill(site: Site) -> Call:
    """Whole sequences."""
    key = site.planned(grid)
    return _core(site, lambda batch: batch.planned(key))


def decode(site: Site) -> Call:
    """Single tokens, in any layout of state."""
    key = site.planned(one_each)
    return _core(site, lambda batch: batch.planned(key))


def _planned(site: Site) -> Callable[[Batch], Grid]:
    key = site.planned(one_each if site.op.decode else grid)
    return lambda batch: batch.planned(key)


def causal_conv(site: Site) -> Call:
    where, weight, layout = _planned(site), site.weight("conv_weight", Packed()), site.layouts["conv"]

    widths = site.op.widths

    def run(qkv: Tensor, state: tuple[Tensor], batch: Batch) -> tuple[Tensor, ...]:
        g = where(batch)
        spread = qkv.new_zeros(*g.real.shape, qkv.shape[1])
        spread[g.live] = convolved(qkv, state[0], weight, g, layout).to(qkv.dtype)
        return tuple(g.collect(spread).split(widths, 1))

    return run


def delta_update(site: Site) -> Call:
    where, op, layout = _planned(site), site.op, site.layouts["delta"]
    a_log, dt_bias = site.weight("A_log"), site.weight("dt_bias")

    def run(mixed: tuple[Tensor, ...], b: Tensor, a: Tensor, state: tuple[Tensor], batch: Batch) -> Tensor:
        g, qkv = where(batch), torch.cat(mixed, 1)
        x, b_, a_ = (g.spread(t)[g.live] for t in (qkv, b, a))
        o = ruled(x, b_, a_, a_log, dt_bias, vk(state[0], layout), g, op)
        spread = qkv.new_zeros(*g.real.shape, *o.shape[2:])
        spread[g.live] = o.to(qkv.dtype)
        return g.collect(spread)

    return run
