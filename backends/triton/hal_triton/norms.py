"""Declarations: norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.device import Device
from hal.formats import Made, Quantized, Tensor
from hal.kernel import Kernel, kernel
from hal.ops import AddRMSNorm, RMSNorm
from hal.requirement import Reason
from hal_triton.small import BLOCKS, ROWS, Encoding, whole_row

CODE = "hal_triton.code.norms"
WIDEST = 16384  # a row is one program's registers


class _RowNorm(Encoding):
    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.world > 1:
            return Reason("rank", f"reduces over no ranks; world is {op.world}")
        if op.hidden > WIDEST:
            return Reason("op", f"needs rows of at most {WIDEST}; hidden is {op.hidden}")
        return super().refuses(op, device)

    def makes(self, op: Any) -> tuple[Made, ...]:
        return (*super().makes(op), *ROWS, *BLOCKS)

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        settings = whole_row(op.hidden, device)
        return settings if op.hidden >= 128 else {**settings, "BLOCK": 128}


@kernel("triton.rms_norm", code=f"{CODE}:rms_norm")
class TritonRMSNorm(_RowNorm, Kernel[RMSNorm]):
    """A program a row, one pass; writes its dtype or fp8."""


@kernel("triton.add_rms_norm", code=f"{CODE}:add_rms_norm")
class TritonAddRMSNorm(_RowNorm, Kernel[AddRMSNorm]):
    """A program a row: add, round, norm in one pass; writes its dtype, fp8, or both."""

    def makes(self, op: AddRMSNorm) -> tuple[Made, ...]:
        wide, single = Tensor(op.dtype), super().makes(op)
        narrow = [form for form in single if isinstance(form, Quantized)]
        return (*single, *((n, wide) for n in narrow), *((wide, n) for n in narrow))
