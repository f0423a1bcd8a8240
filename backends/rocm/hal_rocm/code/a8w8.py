"""fp8 products and the encoder of their input through aiter. Called by keyword only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.formats import Encoded
from hal.kernel import Site
from hal_rocm.layouts import Codes

Call = Callable[[Encoded], Tensor]


def _product(site: Site, gemm: Callable[..., Tensor], shuffled: bool) -> Call:
    layout, rows, out = site.layouts["weight"], site.op.rows, getattr(torch, site.op.dtype)
    assert isinstance(layout, Codes)
    most = site.settings["most"]
    weight = site.weight("weight").view(getattr(torch, layout.kind))
    weight.is_shuffled = shuffled
    scale = site.weight("weight_scale", site.layouts["weight_scale"]).view(-1, 1)

    def run(x: Encoded) -> Tensor:
        if not x.value.shape[0]:
            return torch.empty((0, rows), dtype=out, device=x.value.device)
        # whether aiter honours a stride of rows is not known
        values, scales = x.value.contiguous().split(most), x.scale.contiguous().split(most)
        found = [
            gemm(XQ=v, WQ=weight, x_scale=s, w_scale=scale, dtype=out) for v, s in zip(values, scales, strict=True)
        ]
        return (found[0] if len(found) == 1 else torch.cat(found))[:, :rows]

    return run


def packed(site: Site) -> Call:
    """Columns of padding are cut off by the view."""
    from aiter.ops.gemm_op_a8w8 import gemm_a8w8_bpreshuffle

    return _product(site, gemm_a8w8_bpreshuffle, True)


def plain(site: Site) -> Call:
    from aiter.ops.gemm_op_a8w8 import gemm_a8w8

    return _product(site, gemm_a8w8, False)


def quantize_token(site: Site) -> Callable[[Tensor], Encoded]:
    from aiter.ops.quant import per_token_quant_hip

    kind: Any = getattr(torch, site.op.out.value)

    def run(x: Tensor) -> Encoded:
        if not x.shape[0]:
            return Encoded(torch.empty(x.shape, dtype=kind, device=x.device), x.new_empty((0, 1), dtype=torch.float32))
        return Encoded(*per_token_quant_hip(x=x.contiguous(), quant_dtype=kind))

    return run
