"""Declarations: the causal convolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.kernel import Kernel, Tier, kernel
from hal.layout import Layout, Ring
from hal.ops import CausalConv
from hal_triton.needs import TRITON


@kernel("triton.causal_conv", code="hal_triton.code.conv:causal_conv")
class TritonCausalConv(Kernel[CausalConv]):
    """Tiles of tokens and channels over a ring; the ring moves on in a second launch, when all have read it."""

    tier: ClassVar[Tier] = "portable"
    needs = TRITON
    launches = 2

    def reads(self, op: CausalConv, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {"conv": (Ring(op.conv_width),)}

    def settings(self, op: CausalConv, device: Device) -> Mapping[str, Any]:
        return {"TOKENS": 1 if op.decode else 16, "CHANNELS": 256, "num_warps": 4}
