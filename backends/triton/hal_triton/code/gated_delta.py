"""The decode core of a Gated DeltaNet layer: launches of the kernel in ``decode_core``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.batch import Batch
from hal.formats import Encoded, Quantized
from hal.kernel import Site
from hal.layout import Packed, Ring
from hal_triton.code.decode_core import decode_kernel
from hal_triton.needs import launched, next_power_of_2

Call = Callable[..., Any]
# products and sums may fuse: one rounding less, and the same in every compilation of a kernel
FUSION = True


class Core:
    """What every launch of a site passes: tensors, strides and sizes."""

    def __init__(self, site: Site) -> None:
        op, self.site, self.op = site.op, site, site.op
        self.settings = {k: v for k, v in site.settings.items() if k != "rows"}
        self.weight = site.weight("conv_weight", Packed())
        self.small = (site.weight("A_log"), site.weight("dt_bias"), site.weight("norm"))
        layout = site.layouts["conv"]
        assert isinstance(layout, Ring)
        self.encode = isinstance(op.out, Quantized)
        self.kind = getattr(torch, op.out.value if self.encode else op.dtype)
        self.scale = site.scales["out"] if self.encode else self.small[0]
        self.limit = op.out.limit if self.encode else 0.0
        self.sizes = {
            "KEY_HEADS": op.key_heads,
            "HEADS": op.value_heads,
            "K": op.key_head_dim,
            "V": op.value_head_dim,
            "BK": next_power_of_2(op.key_head_dim),
            "VP": next_power_of_2(op.value_head_dim),
            "WIDTH": op.conv_width,
            "RING": layout.length,
            "ENCODE": self.encode,
            "enable_fp_fusion": FUSION,
        }
        # four taps and four cells of 16 bits: one load of 64 bits each
        self.words = op.conv_width == layout.length == 4 and self.weight.element_size() == 2

    def arguments(
        self, projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor], batch: Batch, out: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments, without the workspace."""
        ring, delta = state
        words = self.words and ring.stride(0) % 4 == 0 and ring.data_ptr() % 8 == 0
        given = (
            *projected, *(x.stride(0) for x in projected),
            batch.slots, batch.contexts, ring, delta, ring.stride(0), delta.stride(0),
            self.weight, *self.small, out, self.scale, self.op.eps, self.limit,
        )  # fmt: skip
        return given, {**self.sizes, "WORDS": words, **launched(self.settings)}

    def empty(self, projected: tuple[Tensor, ...]) -> Tensor:
        return torch.empty((projected[0].shape[0], self.op.value_dim), dtype=self.kind, device=projected[0].device)

    def result(self, out: Tensor) -> Any:
        return Encoded(out, self.scale) if self.encode else out


def decode(site: Site) -> Call:
    """SPLIT programs a row and value head. Counters, where several share a head, belong to this binding."""
    core, op, settings = Core(site), site.op, site.settings
    split, place = settings["SPLIT"], site.runtime.place
    size, most = 2 * core.sizes["VP"], settings["rows"] if split > 1 else 0
    counters = torch.zeros((most, op.value_heads), dtype=torch.int32, device=place)

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor], batch: Batch) -> Any:
        out = core.empty(projected)
        if programs := out.shape[0] * op.value_heads * split:
            work = torch.empty((out.shape[0], op.value_heads, size), dtype=torch.float32, device=place)
            given, named = core.arguments(projected, state, batch, out)
            decode_kernel[(programs,)](*given, work, counters, **named)
        return core.result(out)

    return run
