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


def tapped(x: Tensor, past: Tensor, weight: Tensor) -> Tensor:
    """Causal convolution with SiLU of x ``[live, longest, channels]`` after ``past``."""
    series = torch.cat([past, x], 1)
    taps = weight.float().T
    out = sum((series[:, j : j + x.shape[1]] * taps[j] for j in range(len(taps))), torch.zeros(()))
    return torch.nn.functional.silu(out)


def convolved(x: Tensor, pool: Tensor, weight: Tensor, g: Grid, layout: Layout) -> Tensor:
    """``tapped`` ``[live, longest, channels]``; the pool moves on."""
    kept = weight.shape[1] - 1
    past, x = recent(pool, g, layout, kept), g.spread(x)[g.live]
    last = g.lengths[g.live, None] + torch.arange(kept, device=x.device)
    series = torch.cat([past, x], 1)
    remember(pool, g, layout, series.gather(1, last[..., None].expand(-1, -1, series.shape[2])))
    return tapped(x, past, weight)


def unit(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)``."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class Heads:
    """What the delta rule takes, ``[live, key_heads, value heads of each, longest, ...]``: keys are never repeated."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor

    def cut(self, part: slice) -> Heads:
        """Some of the tokens."""
        q, k, v = (x[..., part, :] for x in (self.q, self.k, self.v))
        return Heads(q, k, v, self.beta[..., part], self.log_decay[..., part])


def heads(qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, g: Grid, op: DeltaSizes) -> Heads:
    """From ``[live, longest, ...]`` after the convolution; what is not real changes nothing."""
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
    return Heads(q, k, v, torch.where(real[:, None, None], beta, 0.0), log_decay)


def held(pool: Tensor, g: Grid, fresh: Tensor, op: DeltaSizes) -> Tensor:
    """States of sequences ``[live, key_heads, group, V, K]``, zero where ``fresh``; pool ``[slots, heads, V, K]``."""
    state = torch.where(fresh[:, None, None, None], 0.0, pool[g.slots].float())
    group = op.value_heads // op.key_heads
    return state.view(len(state), op.key_heads, group, *state.shape[2:])


def ruled(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, pool: Tensor, g: Grid, op: DeltaSizes
) -> Tensor:
    """The delta rule over ``[live, longest, ...]``; gives o ``[live, longest, value_heads, V]``.

    ``pool`` is ``[slots, value_heads, V, K]`` (any strides) and moves on.
    """
    tokens = heads(qkv, b, a, a_log, dt_bias, g, op)
    state = held(pool, g, g.contexts[g.live] == 0, op)
    chunks = []
    for at in range(0, qkv.shape[1], CHUNK):
        some = tokens.cut(slice(at, at + CHUNK))
        out, error = chunk(some, state)
        state = moved_on(state, some.k, error, some.log_decay)
        chunks.append(out)
    pool[g.slots] = state.flatten(1, 2).to(pool.dtype)
    out = torch.cat(chunks, 3) if chunks else tokens.v
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def chunk(x: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """Up to 64 tokens at once from the state before them: outputs and errors.

    With G the cumulated log decay, every exponential is of a difference that is 0 or less.
    The errors e solve (1 + A) e = beta (v - exp(G) S k), A_ij = beta_i exp(G_i - G_j) k_i k_j, j < i.
    """
    total = x.log_decay.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    lower = torch.ones(between.shape[-2:], dtype=torch.bool, device=total.device).tril()
    decay = torch.where(lower, between, -torch.inf).exp()
    since = total.exp()[..., None]
    error = x.beta[..., None] * (x.v - since * (x.k @ state.transpose(-1, -2)))
    if total.shape[-1] > 1:
        mixed = (x.k @ x.k.transpose(-1, -2)) * decay * x.beta[..., None]
        error = torch.linalg.solve_triangular(mixed.tril(-1), error, upper=False, unitriangular=True)
    return since * (x.q @ state.transpose(-1, -2)) + ((x.q @ x.k.transpose(-1, -2)) * decay) @ error, error


def moved_on(state: Tensor, k: Tensor, error: Tensor, log_decay: Tensor) -> Tensor:
    """The state after tokens of known errors."""
    total = log_decay.cumsum(-1)
    to_end = (total[..., -1:] - total).exp()[..., None]
    return total[..., -1].exp()[..., None, None] * state + (error * to_end).transpose(-1, -2) @ k


def vk(pool: Tensor, layout: Layout) -> Tensor:
    """The pool as ``[slots, value_heads, V, K]``, a view."""
    return pool.transpose(-1, -2) if isinstance(layout, KV) else pool


def finished(site: Site) -> Callable[[Tensor, Tensor, Grid], Any]:
    """Gated norm of o ``[live, longest, value_heads, V]`` with the rows of z, in the format of the output."""
    op, norm, kind = site.op, site.weight("norm"), getattr(torch, site.op.dtype)

    def run(o: Tensor, z: Tensor, g: Grid) -> Any:
        gate = torch.nn.functional.silu(g.spread(z)[g.live]).unflatten(-1, (op.value_heads, -1))
        spread = o.new_zeros(*g.real.shape, op.value_dim)
        spread[g.live] = (normed(o, norm, op.eps, 0.0) * gate).flatten(2)
        out = g.collect(spread)
        if isinstance(op.out, Quantized):
            return encode(out.to(kind).float(), op.out, site.scales["out"])
        return out.to(kind)

    return run


def _core(site: Site, where: Callable[[Batch], Grid]) -> Call:
    op, finish = site.op, finished(site)
    weight, a_log, dt_bias = site.weight("conv_weight", Packed()), site.weight("A_log"), site.weight("dt_bias")
    conv_layout, delta_layout = site.layouts["conv"], site.layouts["delta"]

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor], batch: Batch) -> Any:
        qkv, z, b, a = projected
        g = where(batch)
        x = convolved(qkv, state[0], weight, g, conv_layout)
        ba = (g.spread(b)[g.live], g.spread(a)[g.live])
        return finish(ruled(x, *ba, a_log, dt_bias, vk(state[1], delta_layout), g, op), z, g)

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
