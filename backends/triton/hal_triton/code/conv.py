"""The causal convolution with SiLU, for single tokens and for whole sequences."""

# Triton grows tuples by addition, unpacks none
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"
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
from hal_triton.code.parts import moved

Call = Callable[..., Any]


@triton.jit(do_not_specialize=["rows"])
def conv_kernel(
    x_ptr, weight_ptr, ring_ptr, out_ptr, tiles_ptr, starts_ptr, slots_ptr, contexts_ptr, x_row, ring_slot, rows,
    KEY: tl.constexpr, VALUE: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, DECODE: tl.constexpr,
    TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (TOKENS rows of a sequence; CHANNELS): each is read once, AT_ONCE rows under way.

    out: q ``[rows, KEY]``, k, v ``[rows, VALUE]`` one after the other.
    """
    if DECODE:
        sequence = tl.program_id(0)
        first = sequence
        start = sequence
        end = sequence + 1
    else:
        sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
        first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
        start = tl.load(starts_ptr + sequence)
        end = tl.minimum(tl.load(starts_ptr + sequence + 1), first + TOKENS)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    context = tl.load(contexts_ptr + sequence)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    every = channel >= 0
    weights = ()
    for tap in tl.static_range(WIDTH):
        weights = weights + (tl.load(weight_ptr + channel * WIDTH + tap).to(tl.float32),)
    past = ()
    for i in tl.static_range(WIDTH - 1):
        source = first - (WIDTH - 1) + i
        position = context + source - start
        here = (slot >= 0) & (source >= start)
        before = (slot >= 0) & (source < start) & (position >= 0)
        x = tl.load(x_ptr + source.to(tl.int64) * x_row + channel, mask=here & every, other=0.0).to(tl.float32)
        cell = tl.where(before, position, 0) % LENGTH
        ring = ring_ptr + slot * ring_slot + channel * LENGTH + cell
        past = past + (x + tl.load(ring, mask=before & every, other=0.0).to(tl.float32),)
    # a program's channels are of q, of k or of v
    block = tl.program_id(1) * CHANNELS
    if block < 2 * KEY:
        left = block // KEY * KEY
        width = KEY
    else:
        left = 2 * KEY
        width = VALUE
    outs = out_ptr + left * rows.to(tl.int64) + first.to(tl.int64) * width + (block - left) + tl.arange(0, CHANNELS)
    xs = x_ptr + first.to(tl.int64) * x_row + channel
    for at in range(0, end - first, AT_ONCE):
        coming = ()
        for i in tl.static_range(AT_ONCE):
            live = (slot >= 0) & (at + i < end - first)
            row = tl.load(xs + (at + i) * x_row, mask=live & every, other=0.0)
            coming = coming + (row.to(tl.float32),)
        for i in tl.static_range(AT_ONCE):
            total = coming[i] * weights[WIDTH - 1]
            for tap in tl.static_range(WIDTH - 1):
                total += past[tap] * weights[tap]
            value = (total * tl.sigmoid(total)).to(out_ptr.dtype.element_ty)
            tl.store(outs + (at + i) * width, value, mask=(at + i < end - first) & every)
            past = moved(past, coming[i], WIDTH - 1)


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
    """``qkv [rows, channels]``, its row stride free, to dense q, k and v."""
    op, weight, settings = site.op, site.weight("conv_weight", Packed()), dict(site.settings)
    block, warps = settings["CHANNELS"], settings["num_warps"]
    length = site.layouts["conv"].length  # type: ignore[attr-defined]
    key = None if op.decode else site.planned(tiles(settings["TOKENS"]))
    channels, blocks = op.conv_dim, op.conv_dim // block
    fixed = {"LENGTH": length, "WIDTH": op.conv_width, "DECODE": op.decode, "CHANNELS": block, "num_warps": warps}
    tiling = {"KEY": op.key_dim, "VALUE": op.value_dim, "TOKENS": settings["TOKENS"], "AT_ONCE": settings["AT_ONCE"]}

    def run(qkv: Tensor, state: tuple[Tensor], batch: Batch) -> tuple[Tensor, ...]:
        (ring,), rows = state, qkv.shape[0]
        out = torch.empty(rows * channels, dtype=qkv.dtype, device=qkv.device)
        if rows:
            table = batch.slots if op.decode else batch.planned(key)
            where = (batch.cu_seqlens, batch.slots, batch.contexts, qkv.stride(0), ring.stride(0))
            count = rows if op.decode else table.shape[0]
            conv_kernel[(count, blocks)](qkv, weight, ring, out, table, *where, rows, **tiling, **fixed)
            remember_kernel[(batch.sequences, blocks)](qkv, ring, *where, channels, **fixed)
        parts = out.split([rows * n for n in op.widths])
        return tuple(x.view(rows, n) for x, n in zip(parts, op.widths, strict=True))

    return run
