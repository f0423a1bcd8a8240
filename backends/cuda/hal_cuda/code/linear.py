"""cuBLAS through torch: one product, or a product for each of two parts of a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.kernel import Site
from hal.layout import Packed

Call = Callable[..., Any]
Pair = tuple[tuple[Tensor, ...], Tensor]


def linear(site: Site) -> Call:
    """``x @ weight.T``."""
    weight = site.weight("weight", Packed())
    return lambda x: torch.nn.functional.linear(x, weight)


def packed(site: Site) -> Call:
    """One product over all rows of the buffer; outputs are column views, the padding falls outside."""
    norm, weight = site.parts["norm"], site.weight("weight")
    widths = list(site.op.outputs().values())
    used = sum(widths)

    def run(partial: Tensor, residual: Tensor) -> Pair:
        x, residual = norm(partial, residual)
        return torch.nn.functional.linear(x, weight)[:, :used].split(widths, 1), residual

    return run


def halves(site: Site) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """The weight cut before its narrow outputs (b and a), and the widths on both sides."""
    weight, widths = site.weight("weight", Packed()), list(site.op.outputs().values())
    wide = [w for w in widths if w >= max(widths) // 8]
    cut = sum(wide)
    return weight[:cut], weight[cut:], wide, widths[len(wide) :]


def pair(site: Site) -> Call:
    """Two products over row views of the packed buffer: the wide outputs, then the narrow ones."""
    norm = site.parts["norm"]
    wide, narrow, wide_widths, narrow_widths = halves(site)

    def run(partial: Tensor, residual: Tensor) -> Pair:
        x, residual = norm(partial, residual)
        first = torch.nn.functional.linear(x, wide).split(wide_widths, 1)
        second = torch.nn.functional.linear(x, narrow).split(narrow_widths, 1)
        return (*first, *second), residual

    return run


def pair_overlapped(site: Site) -> Call:
    """The narrow product on a second stream, joined before the results are given."""
    norm = site.parts["norm"]
    wide, narrow, wide_widths, narrow_widths = halves(site)
    side = torch.cuda.Stream()

    def run(partial: Tensor, residual: Tensor) -> Pair:
        x, residual = norm(partial, residual)
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            second = torch.nn.functional.linear(x, narrow)
        first = torch.nn.functional.linear(x, wide)
        main.wait_stream(side)
        x.record_stream(side)
        second.record_stream(main)
        return (*first.split(wide_widths, 1), *second.split(narrow_widths, 1)), residual

    return run
