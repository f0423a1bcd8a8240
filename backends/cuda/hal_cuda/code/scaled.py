"""cuBLASLt's fp8 product through torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hal.formats import Encoded
from hal.kernel import Site


def scaled_mm(site: Site) -> Callable[[Encoded], Tensor]:
    """``use_fast_accum=False``: sums stay in float32; the columns of padding are cut off by the view."""
    op, out = site.op, getattr(torch, site.op.dtype)
    weight = site.weight("weight", site.layouts["weight"])
    scale = site.weight("weight_scale", site.layouts["weight_scale"])
    by_rows = op.scheme.weight.scale.per == "channel"
    scale = scale.view(1, -1) if by_rows else scale

    def run(x: Encoded) -> Tensor:
        rows = x.value.shape[0]
        if not rows:
            return torch.empty((0, op.rows), dtype=out, device=x.value.device)
        mine = x.scale.expand(rows, 1).contiguous() if by_rows else x.scale
        product = torch._scaled_mm(x.value, weight.T, mine, scale, out_dtype=out, use_fast_accum=False)
        return product[:, : op.rows]

    return run
