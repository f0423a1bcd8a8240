"""Norms over whole rows, a program a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.formats import Quantized
from hal.kernel import Site
from hal_triton.code.parts import begin
from hal_triton.code.small import Output, grouped, written
from hal_triton.needs import launched

Call = Callable[..., Any]


@triton.jit
def rms_norm_kernel(
    x_ptr, partial_ptr, weight_ptr, out_ptr, wide_ptr, residual_ptr, scale_ptr, x_row, eps, offset, limit,
    HIDDEN: tl.constexpr, ADD: tl.constexpr, ENCODE: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WIDE: the value in its own dtype too. SIZE: columns that share a scale, made here."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    begin(PDL)
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(partial_ptr + row * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        # normalised as rounded
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * HIDDEN + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    value = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps) * (weight + offset)
    if WIDE:
        tl.store(wide_ptr + row * HIDDEN + column, value.to(wide_ptr.dtype.element_ty), mask=inside)
    if SIZE:
        value = value.to(x_ptr.dtype.element_ty).to(tl.float32)
        each: tl.constexpr = SIZE if SIZE < BLOCK else BLOCK
        groups: tl.constexpr = (HIDDEN + SIZE - 1) // SIZE
        value = grouped(value, scale_ptr + row * groups, limit, 0, groups, out_ptr.dtype.element_ty, each, BLOCK)
    else:
        value = written(value, scale_ptr, limit, x_ptr.dtype.element_ty, out_ptr.dtype.element_ty, ENCODE)
    tl.store(out_ptr + row * HIDDEN + column, value, mask=inside)


def _launch(site: Site, x: Tensor, partial: Tensor | None) -> tuple[Any, Tensor]:
    op, weight, rows = site.op, site.weight("norm"), x.shape[0]
    several = op.out if isinstance(op.out, tuple) else None
    narrow = next((i for i, form in enumerate(several) if isinstance(form, Quantized)), 0) if several else 0
    output = Output(site, x, several[narrow], f"out{narrow}") if several else Output(site, x)
    out = output.empty(rows, op.hidden, x.device)
    wide = torch.empty((rows, op.hidden), dtype=x.dtype, device=x.device) if several else out
    residual = x if partial is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        rms_norm_kernel[(rows,)](
            x, x if partial is None else partial, weight, out, wide, residual, output.scale,
            x.stride(0), op.eps, op.offset, output.limit,
            HIDDEN=op.hidden, ADD=partial is not None, ENCODE=output.encode, SIZE=output.size,
            WIDE=several is not None, **launched(site.settings),
        )  # fmt: skip
    made = output.edge(out)
    return ((made, wide) if narrow == 0 else (wide, made)) if several else made, residual


def rms_norm(site: Site) -> Call:
    return lambda x: _launch(site, x, None)[0]


def add_rms_norm(site: Site) -> Call:
    return lambda partial, residual: _launch(site, residual, partial)
