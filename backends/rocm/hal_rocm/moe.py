"""Declarations: aiter's mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.kernel import Kernel, Part, Tier, kernel
from hal.layout import Layout, Packed
from hal.numerics import Class, Numerics
from hal.opening import norm_part
from hal.ops import MoE
from hal.requirement import Reason
from hal_rocm.layouts import ROWS, TWICE, Shuffled
from hal_rocm.rules import AITER, rows_within_buffer


@kernel("rocm.moe", code="hal_rocm.code.moe:fused")
class AiterMoE(Kernel[MoE]):
    """fused_moe over shuffled experts; router, the choice of experts and the shared expert in torch."""

    tier: ClassVar[Tier] = "library"
    needs = AITER
    launches = 18

    def refuses(self, op: MoE, device: Device) -> Reason | None:
        if op.dtype not in ("bfloat16", "float16"):
            return Reason("op", f"needs bfloat16 or float16; dtype is {op.dtype}")
        for name, size in (("hidden", op.hidden), ("intermediate", op.intermediate)):
            if size % TWICE or size % ROWS:
                return Reason("op", f"needs {name} in multiples of {TWICE} to shuffle; {size} leaves {size % TWICE}")
        return None

    def settings(self, op: MoE, device: Device) -> Mapping[str, Any]:
        # nothing else reads shuffled experts, so it takes any rows, some at a time
        return {"rows": rows_within_buffer(4 * op.top_k * op.intermediate, 2 * op.top_k * op.hidden)}

    def reads(self, op: MoE, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        shared = {name: (Packed(),) for name in ("shared_gate_up", "shared_down")}
        return {"experts_gate_up": (Shuffled(),), "experts_down": (Shuffled(),), **shared}

    def parts(self, op: MoE) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}

    def numerics(self, op: MoE) -> Numerics:
        # the normed row, both products and the activation, the experts' sum, the shared expert's
        return Numerics(Class.REASSOCIATED, roundings=4)
