"""Declarations: the causal convolution."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
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
        # a program's channels are of q, of k or of v; a thread moves 16 bytes
        whole = gcd(op.key_dim, op.value_dim)
        channels = min(1024, whole & -whole)
        rows = {"TOKENS": 1, "AT_ONCE": 1} if op.decode else {"TOKENS": 32, "AT_ONCE": 8}
        return {**rows, "CHANNELS": channels, "num_warps": max(1, channels // 256)}
