"""Declarations: norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.device import Device
from hal.kernel import Kernel, kernel
from hal.ops import AddRMSNorm, RMSNorm
from hal.requirement import Reason
from hal_triton.needs import next_power_of_2, overlaps
from hal_triton.small import Encoding

CODE = "hal_triton.code.norms"
WIDEST = 16384  # a row is one program's registers


class _RowNorm(Encoding):
    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.world > 1:
            return Reason("rank", f"reduces over no ranks; world is {op.world}")
        if op.hidden > WIDEST:
            return Reason("op", f"needs rows of at most {WIDEST}; hidden is {op.hidden}")
        return super().refuses(op, device)

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        block = next_power_of_2(op.hidden)
        return {"BLOCK": block, "num_warps": min(16, max(1, block // 512)), "PDL": overlaps(device)}


@kernel("triton.rms_norm", code=f"{CODE}:rms_norm")
class TritonRMSNorm(_RowNorm, Kernel[RMSNorm]):
    """A program a row, one pass; writes its dtype or static fp8."""


@kernel("triton.add_rms_norm", code=f"{CODE}:add_rms_norm")
class TritonAddRMSNorm(_RowNorm, Kernel[AddRMSNorm]):
    """A program a row: add, round, norm in one pass; writes its dtype or static fp8."""
