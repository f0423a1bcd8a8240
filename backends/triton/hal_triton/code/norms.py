"""Norms over whole rows, a program a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernel import Site
from hal_triton.code.parts import begin
from hal_triton.code.small import Output, written
from hal_triton.needs import launched

Call = Callable[..., Any]


@triton.jit
def rms_norm_kernel(
    x_ptr, partial_ptr, weight_ptr, out_ptr, residual_ptr, scale_ptr, x_row, eps, offset, limit,
    HIDDEN: tl.constexpr, ADD: tl.constexpr, ENCODE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    value = written(value, scale_ptr, limit, x_ptr.dtype.element_ty, out_ptr.dtype.element_ty, ENCODE)
    tl.store(out_ptr + row * HIDDEN + column, value, mask=inside)


def _launch(site: Site, x: Tensor, partial: Tensor | None) -> tuple[Any, Tensor]:
    op, weight, output, rows = site.op, site.weight("norm"), Output(site, x), x.shape[0]
    out = output.empty(rows, op.hidden, x.device)
    residual = x if partial is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        rms_norm_kernel[(rows,)](
            x, x if partial is None else partial, weight, out, residual, output.scale,
            x.stride(0), op.eps, op.offset, output.limit,
            HIDDEN=op.hidden, ADD=partial is not None, ENCODE=output.encode, **launched(site.settings),
        )  # fmt: skip
    return output.edge(out), residual


def rms_norm(site: Site) -> Call:
    return lambda x: _launch(site, x, None)[0]


def add_rms_norm(site: Site) -> Call:
    return lambda partial, residual: _launch(site, residual, partial)
