"""Products of 16-bit matrices through torch (hipBLASLt) and through aiter's tuned choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.kernel import Site
from hal.layout import Packed

Call = Callable[..., Any]
Product = Callable[[Tensor, Tensor], Tensor]


def tuned() -> Product:
    """``x @ weight.T`` by the kernel of aiter's table."""
    from aiter.tuned_gemm import gemm_a16w16

    def product(x: Tensor, weight: Tensor) -> Tensor:
        if not x.shape[0]:
            return x.new_empty(0, weight.shape[0])
        found: Tensor = gemm_a16w16(A=x if x.stride(1) == 1 else x.contiguous(), B=weight)
        return found

    return product


def _linear(site: Site, product: Product) -> Call:
    weight = site.weight("weight", Packed())
    return lambda x: product(x, weight)


def linear(site: Site) -> Call:
    return _linear(site, torch.nn.functional.linear)


def linear_tuned(site: Site) -> Call:
    return _linear(site, tuned())


def _packed(site: Site, product: Product) -> Call:
    """One product over all rows of the buffer; outputs are column views."""
    norm, weight = site.parts["norm"], site.weight("weight", Packed())
    widths = list(site.op.outputs().values())

    def run(partial: Tensor, residual: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x, residual = norm(partial, residual)
        return product(x, weight).split(widths, 1), residual

    return run


def packed(site: Site) -> Call:
    return _packed(site, torch.nn.functional.linear)


def packed_tuned(site: Site) -> Call:
    return _packed(site, tuned())
