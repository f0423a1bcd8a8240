"""Activation, encoder, gated norm, embedding, argmax: each element is read once and written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.formats import Encoded, Format, Quantized
from hal.kernel import Site
from hal_triton.code.parts import begin
from hal_triton.needs import launched

Call = Callable[..., Any]
ALL = 1 << 30  # more columns than any row has


@triton.jit
def encoded(value, scale_ptr, limit, kind: tl.constexpr):
    """``value / scale`` as torch divides, saturated, rounded to nearest even; NaN stays NaN."""
    value = tl.div_rn(value, tl.load(scale_ptr))
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    return value.to(kind)


@triton.jit
def written(value, scale_ptr, limit, dtype: tl.constexpr, kind: tl.constexpr, ENCODE: tl.constexpr):
    """Float32 as an output takes it: rounded to the op's dtype, and encoded from there where asked."""
    value = value.to(dtype)
    return encoded(value.to(tl.float32), scale_ptr, limit, kind) if ENCODE else value


@triton.jit
def grouped(value, scale_ptr, limit, first, GROUPS: tl.constexpr, kind: tl.constexpr, SIZE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Codes of ``value [BLOCK]``, groups of SIZE with a scale each, which is written from place ``first`` on."""
    apart = tl.reshape(value, (BLOCK // SIZE, SIZE))
    most = tl.max(tl.abs(apart), 1)
    scale = tl.maximum(tl.div_rn(most, tl.zeros_like(most) + limit), 1.1754943508222875e-38)
    group = first + tl.arange(0, BLOCK // SIZE)
    tl.store(scale_ptr + group, scale, mask=group < GROUPS)
    narrow = tl.div_rn(apart, tl.broadcast_to(scale[:, None], (BLOCK // SIZE, SIZE)))
    narrow = tl.where(narrow > limit, limit, tl.where(narrow < -limit, -limit, narrow))
    return tl.reshape(narrow.to(kind), (BLOCK,))


@triton.jit
def silu_mul_kernel(
    x_ptr, out_ptr, scale_ptr, x_row, limit,
    COLUMNS: tl.constexpr, ENCODE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    gate = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if SIZE:
        value = value.to(x_ptr.dtype.element_ty).to(tl.float32)
        each: tl.constexpr = SIZE if SIZE < BLOCK else BLOCK
        groups: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
        first = tl.program_id(1) * (BLOCK // each)
        value = grouped(value, scale_ptr + row * groups, limit, first, groups, out_ptr.dtype.element_ty, each, BLOCK)
    else:
        value = written(value, scale_ptr, limit, x_ptr.dtype.element_ty, out_ptr.dtype.element_ty, ENCODE)
    tl.store(out_ptr + row * COLUMNS + column, value, mask=inside)


@triton.jit
def quantize_kernel(
    x_ptr, out_ptr, scale_ptr, x_row, limit,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if SIZE:
        each: tl.constexpr = SIZE if SIZE < BLOCK else BLOCK
        groups: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
        first = tl.program_id(1) * (BLOCK // each)
        value = grouped(x, scale_ptr + row * groups, limit, first, groups, out_ptr.dtype.element_ty, each, BLOCK)
    else:
        value = encoded(x, scale_ptr, limit, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * COLUMNS + column, value, mask=inside)


@triton.jit
def gated_rms_norm_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, scale_ptr, z_row, eps, limit,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ENCODE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < HEAD_DIM)
    place = head * HEAD_DIM + column
    x = tl.load(x_ptr + row * (HEADS * HEAD_DIM) + place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_row + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    value = x * tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None] * weight * (z * tl.sigmoid(z))
    value = written(value, scale_ptr, limit, x_ptr.dtype.element_ty, out_ptr.dtype.element_ty, ENCODE)
    tl.store(out_ptr + row * (HEADS * HEAD_DIM) + place, value, mask=inside)


@triton.jit
def embed_kernel(
    ids_ptr, weight_ptr, out_ptr, residual_ptr, first,
    VOCAB: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    place = tl.load(ids_ptr + row).to(tl.int64) - first
    mine = (place >= 0) & (place < VOCAB)
    value = tl.load(weight_ptr + place * HIDDEN + column, mask=inside & mine, other=0.0)
    tl.store(out_ptr + row * HIDDEN + column, value, mask=inside)
    tl.store(residual_ptr + row * HIDDEN + column, tl.zeros_like(value), mask=inside)


@triton.jit
def argmax_kernel(
    x_ptr, best_ptr, x_row, COLUMNS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``best [rows, PIECES]``: value, then place from the end, as one number that compares as both do."""
    begin(PDL)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + column, mask=column < COLUMNS, other=float("-inf")).to(tl.float32)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # no -0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(x != x, 0x7FFFFFFF, order)
    last = tl.where(column < COLUMNS, 0x7FFFFFFF - column, -1)
    tl.store(best_ptr + row * PIECES + piece, tl.max((order.to(tl.int64) << 32) + last, 0))


@triton.jit
def first_kernel(best_ptr, out_ptr, PIECES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The place of the best of ``best [rows, PIECES]``."""
    begin(PDL)
    row, piece = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * PIECES + piece, mask=piece < PIECES, other=-(2**63))
    tl.store(out_ptr + row, 0x7FFFFFFF - (tl.max(best, 0) & 0x7FFFFFFF))


class Output:
    """Where a kernel writes: an empty tensor of the edge's format, and what encoding takes."""

    def __init__(self, site: Site, like: Tensor, form: Format | None = None, side: str = "out") -> None:
        form = form or site.op.out
        self.form, self.encode = form, isinstance(form, Quantized)
        self.limit = form.limit if isinstance(form, Quantized) else 0.0
        self.kind = getattr(torch, form.value if isinstance(form, Quantized) else site.op.dtype)
        dynamic = isinstance(form, Quantized) and not form.scale.static
        # never read where nothing is encoded
        self.scale = like if dynamic or not self.encode else site.scales[side]
        self.dynamic = dynamic
        self.size = 0  # columns that share a scale made here

    def empty(self, rows: int, columns: int, place: torch.device) -> Tensor:
        if self.dynamic and isinstance(self.form, Quantized):
            block = self.form.scale.block
            self.size = block[1] if block else ALL
            self.scale = torch.empty(self.form.scale.shape(rows, columns), dtype=torch.float32, device=place)
        return torch.empty((rows, columns), dtype=self.kind, device=place)

    def edge(self, value: Tensor) -> Tensor | Encoded:
        return Encoded(value, self.scale) if self.encode else value


def silu_mul(site: Site) -> Call:
    columns, block = site.op.columns, site.settings["BLOCK"]

    def run(x: Tensor) -> Tensor | Encoded:
        output, rows = Output(site, x), x.shape[0]
        out = output.empty(rows, columns, x.device)
        if rows:
            silu_mul_kernel[(rows, triton.cdiv(columns, block))](
                x, out, output.scale, x.stride(0), output.limit,
                COLUMNS=columns, ENCODE=output.encode, SIZE=output.size, **launched(site.settings),
            )  # fmt: skip
        return output.edge(out)

    return run


def quantize(site: Site) -> Call:
    columns, block = site.op.columns, site.settings["BLOCK"]

    def run(x: Tensor) -> Tensor | Encoded:
        output, rows = Output(site, x), x.shape[0]
        out = output.empty(rows, columns, x.device)
        if rows:
            quantize_kernel[(rows, triton.cdiv(columns, block))](
                x, out, output.scale, x.stride(0), output.limit,
                COLUMNS=columns, SIZE=output.size, **launched(site.settings),
            )  # fmt: skip
        return output.edge(out)

    return run


def gated_rms_norm(site: Site) -> Call:
    op, weight = site.op, site.weight("norm")
    groups = triton.cdiv(op.value_heads, site.settings["GROUP"])

    def run(x: Tensor, z: Tensor) -> Tensor | Encoded:
        output, rows = Output(site, x), x.shape[0]
        out = output.empty(rows, op.value_heads * op.value_head_dim, x.device)
        if rows:
            gated_rms_norm_kernel[(rows, groups)](
                x, z, weight, out, output.scale, z.stride(0), op.eps, output.limit,
                HEADS=op.value_heads, HEAD_DIM=op.value_head_dim, ENCODE=output.encode, **launched(site.settings),
            )  # fmt: skip
        return output.edge(out)

    return run


def embed(site: Site) -> Call:
    op, weight, block = site.op, site.weight("weight"), site.settings["BLOCK"]
    first = site.runtime.rank * op.vocab

    def run(ids: Tensor) -> tuple[Tensor, Tensor]:
        out, residual = (weight.new_empty((ids.shape[0], op.hidden)) for _ in range(2))
        if ids.shape[0]:
            embed_kernel[(ids.shape[0], triton.cdiv(op.hidden, block))](
                ids, weight, out, residual, first, VOCAB=op.vocab, HIDDEN=op.hidden, **launched(site.settings)
            )
        return out, residual

    return run


def argmax(site: Site) -> Call:
    columns, settings = site.op.vocab, site.settings
    pieces = triton.cdiv(columns, settings["BLOCK"])
    last = launched({"BLOCK": triton.next_power_of_2(pieces), "PDL": settings["PDL"], "num_warps": 1})

    def run(logits: Tensor) -> Tensor:
        rows = logits.shape[0]
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows:
            best = torch.empty((rows, pieces), dtype=torch.int64, device=logits.device)
            argmax_kernel[(rows, pieces)](
                logits, best, logits.stride(0), COLUMNS=columns, PIECES=pieces, **launched(settings)
            )
            first_kernel[(rows,)](best, out, PIECES=pieces, **last)
        return out

    return run
