"""Verification in torch: the core over pending tokens, and which drafts stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.batch import Batch
from hal.kernel import Site
from hal.layout import Packed, Tail
from hal_torch.code.gated_delta import (
    Grid,
    chunk,
    finished,
    grid,
    heads,
    held,
    moved_on,
    recent,
    tapped,
    vk,
)
from hal_torch.code.small import sampled

Call = Callable[..., Any]


def waiting(batch: Batch) -> Grid:
    """The plan of a verify step: sequences that have rows, or tokens pending."""
    g = grid(batch)
    live = ((batch.slots >= 0) & ((g.lengths > 0) | (batch.accepted > 0))).nonzero()[:, 0]
    return Grid(g.index, g.real, g.lengths, batch.slots[live].long(), live, g.contexts, g.rows)


def verify(site: Site) -> Call:
    """Pending tokens into the state, then the rows on from there: their changes stay pending."""
    op, finish, key = site.op, finished(site), site.planned(waiting)
    weight, a_log, dt_bias = site.weight("conv_weight", Packed()), site.weight("A_log"), site.weight("dt_bias")
    conv_layout, delta_layout, tail = (site.layouts[n] for n in ("conv", "delta", "pending"))
    assert isinstance(tail, Tail)
    widths = (op.key_dim, op.value_dim, op.value_heads)

    def applied(state: Tensor, pending: Tensor, g: Grid, accepted: Tensor) -> Tensor:
        back = torch.arange(-op.queries, 0, device=accepted.device)
        stands = (back >= -accepted[:, None])[..., None]
        place = (g.contexts[g.live, None] + back) % tail.length
        left = torch.where(stands, pending[g.slots[:, None], place], 0.0)
        k, error, log_decay = (x.unflatten(-1, (op.key_heads, -1)).movedim(2, 1) for x in left.split(widths, -1))
        error = error.unflatten(-1, (-1, op.value_head_dim)).movedim(3, 2)
        return moved_on(state, k[:, :, None], error, log_decay.transpose(-1, -2))

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Any:
        (qkv, z, b, a), (conv, delta, pending) = projected, state
        g: Grid = batch.planned(key)
        accepted, pool = batch.accepted[g.live], vk(delta, delta_layout)
        now = applied(held(pool, g, g.contexts[g.live] == accepted, op), pending, g, accepted)
        pool[g.slots] = now.flatten(1, 2).to(pool.dtype)
        x = g.spread(qkv)[g.live]
        mixed = tapped(x, recent(conv, g, conv_layout, op.conv_width - 1), weight)
        tokens = heads(mixed, g.spread(b)[g.live], g.spread(a)[g.live], a_log, dt_bias, g, op)
        out, error = chunk(tokens, now)
        sequence, step = g.real[g.live].nonzero(as_tuple=True)
        slot, position = g.slots[sequence], g.contexts[g.live][sequence] + step
        conv[slot, :, position % conv.shape[2]] = x[sequence, step].to(conv.dtype)
        log_decay = tokens.log_decay[..., None]
        left = torch.cat([t.permute(0, 3, 1, 2, 4).flatten(2) for t in (tokens.k, error, log_decay)], -1)
        pending[slot, position % tail.length] = left[sequence, step]
        return finish(out.permute(0, 3, 1, 2, 4).flatten(2, 3), z, g)

    return run


def accept(site: Site) -> Call:
    """Picks of all rows, then how many drafts in a row are among them."""
    greedy = site.parts["greedy"]

    def run(logits: Tensor, ids: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = torch.arange(ids.shape[0], device=ids.device)
        starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
        sequence = torch.searchsorted(ends.long(), rows, right=True).clamp_(max=max(0, batch.sequences - 1))
        if batch.host.greedy or not ids.numel():
            picks = greedy(logits)
        else:
            temperature, top_p, top_k = (x[sequence] for x in (batch.temperature, batch.top_p, batch.top_k))
            picks = sampled(logits, temperature, top_p, top_k, batch.uniform)
        # the first row that the token drafted after it does not follow; a sequence's last row is one
        right = torch.zeros_like(rows, dtype=torch.bool)
        right[:-1] = (picks[:-1] == ids[1:]) & (rows[1:] < ends[sequence][:-1])
        stops = torch.where(right, ids.shape[0], rows)
        first = torch.full(ends.shape, ids.shape[0], dtype=torch.int64, device=ids.device)
        first = first.scatter_reduce(0, sequence, stops, "amin")
        accepted = torch.where((batch.slots >= 0) & (ends > starts), first + 1 - starts, 0)
        return picks, accepted.to(torch.int32)

    return run
