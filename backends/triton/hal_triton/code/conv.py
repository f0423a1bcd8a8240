"""The causal convolution with SiLU, for single tokens and for whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.batch import Batch
from hal.kernel import Site
from hal.layout import Packed

Call = Callable[..., Any]


@triton.jit
def conv_kernel(
    x_ptr, weight_ptr, ring_ptr, out_ptr, tiles_ptr, starts_ptr, slots_ptr, contexts_ptr,
    x_row, ring_slot, channels,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, DECODE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    if DECODE:
        sequence = tl.program_id(0)
        first = sequence
        start = sequence
        end = sequence + 1
    else:
        sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
        first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
        start = tl.load(starts_ptr + sequence)
        end = tl.load(starts_ptr + sequence + 1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    context = tl.load(contexts_ptr + sequence)
    row = first + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    live = (row < end) & (slot >= 0)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        source = row - back
        here = live & (source >= start)
        position = context + source - start
        before = live & (source < start) & (position >= 0)
        x = tl.load(
            x_ptr + source.to(tl.int64)[:, None] * x_row + channel[None, :],
            mask=here[:, None] & inside[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        cell = tl.where(before, position, 0) % LENGTH
        x += tl.load(
            ring_ptr + slot * ring_slot + channel[None, :] * LENGTH + cell[:, None],
            mask=before[:, None] & inside[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        total += x * tl.load(weight_ptr + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
    value = total * tl.sigmoid(total)
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * channels + channel[None, :],
        value.to(out_ptr.dtype.element_ty),
        mask=(row < end)[:, None] & inside[None, :],
    )


@triton.jit
def remember_kernel(
    x_ptr, ring_ptr, starts_ptr, slots_ptr, contexts_ptr, x_row, ring_slot, channels,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, DECODE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = sequence if DECODE else tl.load(starts_ptr + sequence)
    end = sequence + 1 if DECODE else tl.load(starts_ptr + sequence + 1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    context = tl.load(contexts_ptr + sequence)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    for back in tl.static_range(1, WIDTH):
        row = end - back
        moves = (row >= start) & (slot >= 0) & (channel < channels)
        x = tl.load(x_ptr + tl.maximum(row, 0).to(tl.int64) * x_row + channel, mask=moves, other=0.0)
        cell = tl.maximum(context + row - start, 0) % LENGTH
        tl.store(ring_ptr + slot * ring_slot + channel * LENGTH + cell, x, mask=moves)


def tiles(tokens: int) -> Callable[[Batch], Tensor]:
    """The plan of a prefill step: sequence and first row of each tile, ``[tiles, 2]`` int32."""

    def plan(batch: Batch) -> Tensor:
        found, row = [], 0
        for index, length in enumerate(batch.host.lengths):
            found += [(index, at) for at in range(row, row + length, tokens)]
            row += length
        return torch.tensor(found, dtype=torch.int32).reshape(-1, 2).to(batch.slots.device)

    return plan


def causal_conv(site: Site) -> Call:
    """``qkv [rows, channels]``, its row stride free, to dense ``[rows, channels]``."""
    op, weight, settings = site.op, site.weight("conv_weight", Packed()), dict(site.settings)
    tokens, warps = settings["TOKENS"], settings["num_warps"]
    width, block = op.conv_width, settings["CHANNELS"]
    length = site.layouts["conv"].length  # type: ignore[attr-defined]
    key = None if op.decode else site.planned(tiles(tokens))

    def run(qkv: Tensor, state: tuple[Tensor], batch: Batch) -> Tensor:
        (ring,) = state
        rows, channels = qkv.shape
        out = torch.empty((rows, channels), dtype=qkv.dtype, device=qkv.device)
        if not rows:
            return out
        table = batch.slots if op.decode else batch.planned(key)
        fixed = {"LENGTH": length, "WIDTH": width, "DECODE": op.decode, "CHANNELS": block, "num_warps": warps}
        blocks = triton.cdiv(channels, block)
        where = (batch.cu_seqlens, batch.slots, batch.contexts, qkv.stride(0), ring.stride(0), channels)
        count = rows if op.decode else table.shape[0]
        conv_kernel[(count, blocks)](qkv, weight, ring, out, table, *where, TOKENS=tokens, **fixed)
        remember_kernel[(batch.sequences, blocks)](qkv, ring, *where, **fixed)
        return out

    return run
