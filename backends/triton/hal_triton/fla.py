"""Declarations: flash-linear-attention's kernels (fla-core)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hal.device import Device
from hal.kernel import Kernel, Tier, kernel
from hal.layout import VK, Layout
from hal.numerics import Class, Numerics
from hal.ops import GatedDeltaUpdate
from hal.requirement import Reason, library
from hal_triton.needs import TRITON


@kernel("triton.fla_chunk", code="hal_triton.code.fla:chunk")
class FlaChunk(Kernel[GatedDeltaUpdate]):
    """fla-core's chunked delta rule over sequences of any lengths, gates and L2 norms inside."""

    tier: ClassVar[Tier] = "library"
    # 0.5 has neither name for the order of the state; 0.6 calls it state_v_first
    needs = (*TRITON, library("fla_core", ">=0.6,<0.8"))
    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"delta": (VK(),)}
    launches = 10

    def refuses(self, op: GatedDeltaUpdate, device: Device) -> Reason | None:
        if op.decode:
            return Reason("op", "needs whole sequences; decode is one token of each")
        if op.dtype == "float32":
            return Reason("op", "needs 16-bit inputs; dtype is float32")
        if op.key_head_dim > 256:
            return Reason("op", f"needs key_head_dim of at most 256; it is {op.key_head_dim}")
        return None

    def numerics(self, op: GatedDeltaUpdate) -> Numerics:
        # products of 16-bit operands, the inverse of a chunk among them
        return Numerics(Class.REASSOCIATED, roundings=4)
