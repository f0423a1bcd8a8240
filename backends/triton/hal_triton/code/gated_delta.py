"""The decode core of a Gated DeltaNet layer: launches of the kernels in ``decode_core``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.batch import Batch
from hal.formats import Encoded, Quantized
from hal.kernel import Site
from hal.layout import Packed, Ring
from hal_triton.code.decode_core import decode_kernel, split_kernel
from hal_triton.needs import next_power_of_2

Call = Callable[..., Any]
# products and sums may fuse: one rounding less, and the same in every compilation of a kernel
FUSION = True


class Core:
    """What both arrangements pass: tensors, strides and sizes of one site."""

    def __init__(self, site: Site) -> None:
        op, self.site, self.op = site.op, site, site.op
        self.weight = site.weight("conv_weight", Packed())
        self.small = (site.weight("A_log"), site.weight("dt_bias"), site.weight("norm"))
        layout = site.layouts["conv"]
        assert isinstance(layout, Ring)
        self.encode = isinstance(op.out, Quantized)
        self.kind = getattr(torch, op.out.value if self.encode else op.dtype)
        self.scale = site.scales["out"] if self.encode else self.small[0]
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
        """Positional and named arguments that the kernels share."""
        ring, delta = state
        words = self.words and ring.stride(0) % 4 == 0 and ring.data_ptr() % 8 == 0
        limit = self.op.out.limit if self.encode else 0.0
        given = (
            *projected, *(x.stride(0) for x in projected),
            batch.slots, batch.contexts, ring, delta, ring.stride(0), delta.stride(0),
            self.weight, *self.small, out, self.scale, self.op.eps, limit,
        )  # fmt: skip
        return given, {**self.sizes, "WORDS": words, **_launch(self.site.settings)}

    def empty(self, projected: tuple[Tensor, ...]) -> Tensor:
        return torch.empty((projected[0].shape[0], self.op.value_dim), dtype=self.kind, device=projected[0].device)

    def result(self, out: Tensor) -> Any:
        return Encoded(out, self.scale) if self.encode else out


def _launch(settings: Any) -> dict[str, Any]:
    found = {k: v for k, v in settings.items() if k != "programs"}
    return {**found, "launch_pdl": True} if settings["PDL"] else found


def decode(site: Site) -> Call:
    """A program a row and value head, or as many as ``programs`` that take them in turn."""
    core, programs = Core(site), site.settings["programs"]

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor], batch: Batch) -> Any:
        out = core.empty(projected)
        items = out.shape[0] * core.op.value_heads
        if items:
            given, named = core.arguments(projected, state, batch, out)
            grid = min(items, programs) if programs else items
            decode_kernel[(grid,)](*given, items, PERSISTENT=bool(programs), **named)
        return core.result(out)

    return run


def decode_split(site: Site) -> Call:
    """V in blocks over programs; o of a head meets in a workspace, counted by this binding's counters."""
    core, most = Core(site), site.settings["rows"]
    op, place = site.op, site.runtime.place
    blocks = core.sizes["VP"] // site.settings["BV"]
    work = torch.empty((most, op.value_heads, core.sizes["VP"]), dtype=torch.float32, device=place)
    counters = torch.zeros((most, op.value_heads), dtype=torch.int32, device=place)

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor], batch: Batch) -> Any:
        out = core.empty(projected)
        if rows := out.shape[0]:
            given, named = core.arguments(projected, state, batch, out)
            named.pop("rows")
            split_kernel[(blocks, op.value_heads, rows)](*given, work, counters, **named)
        return core.result(out)

    return run
