"""Declarations: 16-bit products through hipBLASLt, as torch calls it, and through aiter's tuned choice.

No figures tell the two apart here: hipBLASLt's come first by name, the tuned ones by ``HAL_PREFER``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.kernel import Kernel, Part, Tier, kernel
from hal.layout import Layout, Packed
from hal.opening import norm_part
from hal.ops import Gemm, InProj, Linear
from hal.requirement import Reason
from hal_rocm.rules import AITER, HIPBLASLT

CODE = "hal_rocm.code.linear"
PACKED: Mapping[str, tuple[Layout, ...]] = {"weight": (Packed(),)}


class _Packed(Kernel[InProj]):
    tier: ClassVar[Tier] = "library"
    layouts = PACKED

    def refuses(self, op: InProj, device: Device) -> Reason | None:
        return _no_16_bit(op)

    def parts(self, op: InProj) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}


@kernel("rocm.packed_bf16", code=f"{CODE}:packed")
class PackedBf16(_Packed, Kernel[InProj]):
    """hipBLASLt's product over the rows of all parts; outputs are views of its columns."""

    needs = HIPBLASLT


@kernel("rocm.packed_tuned", code=f"{CODE}:packed_tuned")
class PackedTuned(_Packed, Kernel[InProj]):
    """The same through the kernel that aiter's table of measurements names for the sizes, else torch."""

    needs = AITER


def _no_16_bit(op: Any) -> Reason | None:
    if op.dtype not in ("bfloat16", "float16"):
        return Reason("op", f"needs bfloat16 or float16; dtype is {op.dtype}")
    return None


class _Gemm(Kernel[Any]):
    tier: ClassVar[Tier] = "library"
    layouts = PACKED

    def refuses(self, op: Any, device: Device) -> Reason | None:
        return _no_16_bit(op)


@kernel("rocm.gemm", code=f"{CODE}:linear", serves=(Gemm, Linear))
class HipblasltGemm(_Gemm):
    """hipBLASLt through torch."""

    needs = HIPBLASLT


@kernel("rocm.gemm_tuned", code=f"{CODE}:linear_tuned", serves=(Gemm, Linear))
class TunedGemm(_Gemm):
    """The kernel that aiter's table of measurements names for the sizes, else torch."""

    needs = AITER
