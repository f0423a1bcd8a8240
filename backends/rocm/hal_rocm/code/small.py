"""aiter's activation and encoder behind our contracts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.formats import Encoded
from hal.kernel import Site

Call = Callable[..., Any]


def silu_mul(site: Site) -> Call:
    from aiter.ops.activation import silu_and_mul

    columns = site.op.columns

    def run(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], columns)
        if x.shape[0]:
            silu_and_mul(out=out, input=x.contiguous())
        return out

    return run


def quantize(site: Site) -> Call:
    from aiter.ops.quant import static_per_tensor_quant

    scale, kind = site.scales["out"], getattr(torch, site.op.out.value)

    def run(x: Tensor) -> Encoded:
        out = torch.empty(x.shape, dtype=kind, device=x.device)
        if x.shape[0]:
            static_per_tensor_quant(out=out, input=x.contiguous(), scale=scale)
        return Encoded(out, scale)

    return run
