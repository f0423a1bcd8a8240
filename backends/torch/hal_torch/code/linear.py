"""Projections and matrix products in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.formats import Encoded
from hal.kernel import Site
from hal.layout import Packed, Separate
from hal.ops.formulas import decode, real

Call = Callable[..., Any]
Pair = tuple[tuple[Tensor, ...], Tensor]


def packed(site: Site) -> Call:
    """One product; outputs are column views of it."""
    return _one_product(site, site.weight("weight", Packed()))


def padded(site: Site) -> Call:
    """One product over the padded weight; the columns of the padding are cut off by the views."""
    return _one_product(site, site.weight("weight"))


def _one_product(site: Site, weight: Tensor) -> Call:
    norm, widths = site.parts["norm"], list(site.op.outputs().values())
    used = sum(widths)

    def run(partial: Tensor, residual: Tensor) -> Pair:
        x, residual = norm(partial, residual)
        return torch.nn.functional.linear(x, weight)[:, :used].split(widths, 1), residual

    return run


def separate(site: Site) -> Call:
    """A product for each part, written side by side into its output."""
    norm, views = site.parts["norm"], site.weight("weight", Separate())
    outputs: dict[str, list[Tensor]] = {}
    for part in site.op.parts:
        outputs.setdefault(part.output, []).append(views[part.name].T)
    plan = [(sum(w.shape[1] for w in weights), weights) for weights in outputs.values()]

    def run(partial: Tensor, residual: Tensor) -> Pair:
        x, residual = norm(partial, residual)
        value = []
        for width, weights in plan:
            out, column = x.new_empty(x.shape[0], width), 0
            for weight in weights:
                torch.matmul(x, weight, out=out[:, column : column + weight.shape[1]])
                column += weight.shape[1]
            value.append(out)
        return tuple(value), residual

    return run


def linear(site: Site) -> Call:
    """``x @ weight.T``."""
    weight = site.weight("weight", Packed())
    return lambda x: torch.nn.functional.linear(x, weight)


def widened(site: Site) -> Callable[[], Tensor]:
    """The real values of a quantized weight in float32, made at each call."""
    weight, scale = site.weight("weight", Packed()), site.weight("weight_scale", Packed())
    within = held(site, "weight_global")
    return lambda: real(weight, scale, site.op.weight, torch.float32, within)


def held(site: Site, memory: str) -> Any:
    """The tensor of a memory, packed where it has parts; None where the op has no such memory."""
    return site.weight(memory, Packed()) if memory in site.storages else None


def linear_quantized(site: Site) -> Call:
    """Real values of both factors, in float32."""
    form, weight, out = site.op.scheme.activations, widened(site), getattr(torch, site.op.dtype)

    def run(x: Encoded) -> Tensor:
        return torch.nn.functional.linear(decode(x, form, torch.float32), weight()).to(out)

    return run


def linear_widened(site: Site) -> Call:
    """The weight in float32 at each call."""
    weight = widened(site)
    return lambda x: torch.nn.functional.linear(x.float(), weight()).to(x.dtype)
