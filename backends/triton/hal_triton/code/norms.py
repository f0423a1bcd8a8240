"""Norms over whole rows, a program a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.formats import Encoded, Quantized
from hal.kernel import Site

Call = Callable[..., Any]


@triton.jit
def rms_norm_kernel(
    x_ptr, partial_ptr, weight_ptr, out_ptr, residual_ptr, scale_ptr, x_row, eps, offset, limit,
    HIDDEN: tl.constexpr, ADD: tl.constexpr, ENCODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(partial_ptr + row * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        # normalised as rounded
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * HIDDEN + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    value = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps) * (weight + offset)
    if ENCODE:
        value = value.to(residual_ptr.dtype.element_ty).to(tl.float32) / tl.load(scale_ptr)
        value = tl.minimum(tl.maximum(value, -limit), limit)
    tl.store(out_ptr + row * HIDDEN + column, value.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(site: Site, x: Tensor, partial: Tensor | None) -> tuple[Any, Tensor]:
    op, weight = site.op, site.weight("norm")
    encode = isinstance(op.out, Quantized)
    kind = getattr(torch, op.out.value) if encode else x.dtype
    out = torch.empty((x.shape[0], op.hidden), dtype=kind, device=x.device)
    residual = torch.empty_like(x, memory_format=torch.contiguous_format) if partial is not None else x
    scale = site.scales["out"] if encode else weight
    if x.shape[0]:
        rms_norm_kernel[(x.shape[0],)](
            x, x if partial is None else partial, weight, out, residual, scale, x.stride(0), op.eps,
            getattr(op, "offset", 1.0), op.out.limit if encode else 0.0,
            HIDDEN=op.hidden, ADD=partial is not None, ENCODE=encode, **site.settings,
        )  # fmt: skip
    return (Encoded(out, scale) if encode else out), residual


def rms_norm(site: Site) -> Call:
    return lambda x: _launch(site, x, None)[0]


def add_rms_norm(site: Site) -> Call:
    return lambda partial, residual: _launch(site, residual, partial)
