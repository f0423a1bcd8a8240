"""Gate split, Gemma's norm, partial interleaved MRoPE and the KV write in one launch.

Angles are kept in turns, as 64-bit fixed-point fractions: position times frequency wraps around
where a turn is complete, so the reduction is exact, an integer product, at any position and on any
chip. In float32 the product would be off by 0.01 radians at position 100,000; in float64 it would
cost what chips for graphics hardly have. What is left is float32's rounding of an angle of at
most half a turn, 2e-7 radians.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.batch import Batch
from hal.kernel import Site
from hal_triton.code.parts import begin
from hal_triton.needs import cdiv, launched, next_power_of_2

Call = Callable[..., Any]


def turns(theta: float, rotary_dim: int) -> list[int]:
    """Turns per position of each frequency, in 2**-64 of a turn; at most 1 / (2 pi), so below 2**63."""
    return [round(theta ** (-2 * i / rotary_dim) / (2 * pi) * 2.0**64) for i in range(rotary_dim // 2)]


@triton.jit
def angles(positions_ptr, turns_ptr, row, position_axis, position_row, real, HALF: tl.constexpr, PAIRS: tl.constexpr,
           HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Angles of ``row [ROWS, 1]`` for every frequency: ``[ROWS, PAIRS]``, within half a turn of zero."""
    pair = tl.arange(0, PAIRS)[None, :]
    high = (pair % 3 == 1) & (pair < 3 * HEIGHT)
    wide = (pair % 3 == 2) & (pair < 3 * WIDTH)
    axis = tl.where(high, 1, tl.where(wide, 2, 0)).to(tl.int64)
    inside = real & (pair < HALF)
    position = tl.load(positions_ptr + axis * position_axis + row * position_row, mask=inside, other=0).to(tl.int64)
    turn = position * tl.load(turns_ptr + pair, mask=pair < HALF, other=0)
    return (turn >> 32).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2**32


@triton.jit
def turn_heads(
    source, target, weight_ptr, cos, sin, read, write, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads ``[ROWS, GROUP, 1]`` at ``source``, to ``target``; cos and sin ``[ROWS, 1, PAIRS]``."""
    column = tl.arange(0, BLOCK)[None, None, :]
    x = tl.load(source + column, mask=read & (column < HEAD_DIM), other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 2, keep_dims=True) / HEAD_DIM + eps)
    if 2 * HALF < HEAD_DIM:
        weight = tl.load(weight_ptr + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32) + 1.0
        rest = write & (column >= 2 * HALF) & (column < HEAD_DIM)
        tl.store(target + column, (x * scale * weight).to(target.dtype.element_ty), mask=rest)
    # both halves again, from the cache: a pair meets in one thread
    pair = tl.arange(0, PAIRS)[None, None, :]
    inside = pair < HALF
    low = tl.load(source + pair, mask=read & inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + pair, mask=read & inside, other=0.0).to(tl.float32)
    low *= scale * (tl.load(weight_ptr + pair, mask=inside, other=0.0).to(tl.float32) + 1.0)
    high *= scale * (tl.load(weight_ptr + HALF + pair, mask=inside, other=0.0).to(tl.float32) + 1.0)
    kind = target.dtype.element_ty
    tl.store(target + pair, (low * cos - high * sin).to(kind), mask=write & inside)
    tl.store(target + HALF + pair, (high * cos + low * sin).to(kind), mask=write & inside)


@triton.jit
def qk_norm_rope_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, q_ptr, kv_ptr, cells_ptr, positions_ptr, turns_ptr,
    rows, qkv_row, position_axis, position_row, kv_page, kv_side, kv_cell, kv_head, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, Q_GROUPS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    group = tl.program_id(1)
    angle = angles(
        positions_ptr, turns_ptr, row, position_axis, position_row, row < rows, HALF, PAIRS, HEIGHT, WIDTH
    )  # fmt: skip
    cos, sin = tl.cos(angle)[:, None, :], tl.sin(angle)[:, None, :]
    row = row[:, :, None]
    head = tl.arange(0, GROUP)[None, :, None]
    if group < Q_GROUPS:
        head += group * GROUP
        real = (row < rows) & (head < HEADS)
        source = qkv_ptr + row * qkv_row + head * (2 * HEAD_DIM)
        target = q_ptr + row * (HEADS * HEAD_DIM) + head * HEAD_DIM
        turn_heads(source, target, q_norm_ptr, cos, sin, real, real, eps, HEAD_DIM, HALF, PAIRS, BLOCK)
    else:
        head += (group - Q_GROUPS) * GROUP
        real = (row < rows) & (head < KV_HEADS)
        cell = tl.load(cells_ptr + row, mask=row < rows, other=-1)
        kept = real & (cell >= 0)
        target = kv_ptr + (cell // PAGE_SIZE) * kv_page + (cell % PAGE_SIZE) * kv_cell + head * kv_head
        source = qkv_ptr + row * qkv_row + 2 * HEADS * HEAD_DIM + head * HEAD_DIM
        turn_heads(source, target, k_norm_ptr, cos, sin, kept, kept, eps, HEAD_DIM, HALF, PAIRS, BLOCK)
        column = tl.arange(0, BLOCK)[None, None, :]
        kept = kept & (column < HEAD_DIM)
        value = tl.load(source + KV_HEADS * HEAD_DIM + column, mask=kept, other=0.0)
        tl.store(target + kv_side + column, value, mask=kept)


def qk_norm_rope(site: Site) -> Call:
    op, settings = site.op, site.settings
    q_norm, k_norm = site.weight("q_norm"), site.weight("k_norm")
    table = torch.tensor(turns(op.theta, op.rotary_dim), dtype=torch.int64, device=site.runtime.place)
    half, width = op.rotary_dim // 2, 2 * op.heads * op.head_dim
    groups = [cdiv(n, settings["GROUP"]) for n in (op.heads, op.kv_heads)]
    sections = op.sections or (0, 0, 0)

    def run(qkv: Tensor, state: tuple[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        rows, (kv,), positions = qkv.shape[0], state, batch.positions
        q = torch.empty((rows, op.heads, op.head_dim), dtype=qkv.dtype, device=qkv.device)
        gate = qkv[:, :width].unflatten(1, (op.heads, 2, op.head_dim))[:, :, 1]
        if not rows:
            return q, gate
        axis = positions.stride(0) if positions.dim() == 2 else 0
        qk_norm_rope_kernel[(cdiv(rows, settings["ROWS"]), sum(groups))](
            qkv, q_norm, k_norm, q, kv, batch.cells, positions, table,
            rows, qkv.stride(0), axis, positions.stride(-1), *kv.stride()[:4], op.eps,
            HEADS=op.heads, KV_HEADS=op.kv_heads, HEAD_DIM=op.head_dim, HALF=half,
            HEIGHT=sections[1], WIDTH=sections[2], PAGE_SIZE=op.page_size,
            PAIRS=next_power_of_2(half), BLOCK=next_power_of_2(op.head_dim), Q_GROUPS=groups[0], **launched(settings),
        )  # fmt: skip
        return q, gate

    return run
