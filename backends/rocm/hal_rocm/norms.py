"""Declarations: aiter's norms, alone, with the residual, and with the reduction over ranks before it."""

from __future__ import annotations

from typing import Any, ClassVar

from hal.device import Device
from hal.kernel import Kernel, Rows, Tier, kernel
from hal.ops import AddRMSNorm, RMSNorm
from hal.requirement import Reason
from hal_rocm.rules import AITER, rows_within_buffer

CODE = "hal_rocm.code.norms"
WIDEST = 8192  # a row of the norm without residual
WIDEST_REDUCED = 16384
REDUCED_BYTES = 64 * 2**20  # of one rank's tensor
WORLDS = (2, 4, 8)  # ranks whose buffers the fused reduction is made for


class _Norm(Kernel[Any]):
    tier: ClassVar[Tier] = "library"
    needs = AITER

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.dtype not in ("bfloat16", "float16"):
            return Reason("op", f"needs bfloat16 or float16; dtype is {op.dtype}")
        if op.offset not in (0.0, 1.0):
            return Reason("op", f"needs an offset of 0 or 1 (gemma_norm); it is {op.offset:g}")
        return None

    def rows(self, op: Any, device: Device) -> Rows:
        return (1, rows_within_buffer(2 * op.hidden))


@kernel("rocm.rms_norm", code=f"{CODE}:rms_norm")
class AiterRMSNorm(_Norm, Kernel[RMSNorm]):
    """aiter's rmsnorm, weight + 1 formed in float32 where the offset is 1."""

    def refuses(self, op: RMSNorm, device: Device) -> Reason | None:
        if op.hidden > WIDEST:
            return Reason("op", f"needs rows of at most {WIDEST}; hidden is {op.hidden}")
        return super().refuses(op, device)


@kernel("rocm.add_rms_norm", code=f"{CODE}:add_rms_norm")
class AiterAddRMSNorm(_Norm, Kernel[AddRMSNorm]):
    """aiter's add and norm in one launch, out of place."""

    def refuses(self, op: AddRMSNorm, device: Device) -> Reason | None:
        if op.world > 1:
            return Reason("rank", f"needs one rank, for it reduces over none; world is {op.world}")
        return super().refuses(op, device)


@kernel("rocm.reduce_add_rms_norm", code=f"{CODE}:reduce_add_rms_norm")
class AiterReduceAddRMSNorm(_Norm, Kernel[AddRMSNorm]):
    """aiter's all-reduce with add and norm behind it in one launch, over its own group of all ranks."""

    def refuses(self, op: AddRMSNorm, device: Device) -> Reason | None:
        if op.world not in WORLDS:
            wanted = " or ".join(map(str, WORLDS))
            return Reason("rank", f"needs {wanted} ranks to reduce over; world is {op.world}")
        if op.hidden > WIDEST_REDUCED:
            return Reason("op", f"needs rows of at most {WIDEST_REDUCED}; hidden is {op.hidden}")
        return super().refuses(op, device)

    def rows(self, op: AddRMSNorm, device: Device) -> Rows:
        return (1, max(1, (REDUCED_BYTES - 1) // (2 * op.hidden)))
