"""Declarations: aiter's activation and its encoder with a static scale.

aiter has no gated norm that writes bfloat16: the portable one serves.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hal.device import Device
from hal.formats import Format, Quantized, Scale
from hal.kernel import Kernel, Rows, Tier, kernel
from hal.ops import Quantize, SiluMul
from hal.requirement import Reason, feature
from hal_rocm.rules import AITER, rows_within_buffer

CODE = "hal_rocm.code.small"
VECTOR = 16  # elements that a thread moves: a narrower tail is written past its row's end
ENCODINGS = tuple(Quantized(f"float8_{kind}", Scale("tensor", static=True)) for kind in ("e4m3fn", "e4m3fnuz"))


def _no_vectors(op: Any) -> Reason | None:
    if op.dtype not in ("bfloat16", "float16"):
        return Reason("op", f"needs bfloat16 or float16; dtype is {op.dtype}")
    if op.columns % VECTOR:
        return Reason("op", f"needs columns in multiples of {VECTOR}; {op.columns} leaves {op.columns % VECTOR}")
    return None


@kernel("rocm.silu_mul", code=f"{CODE}:silu_mul")
class AiterSiluMul(Kernel[SiluMul]):
    """aiter's silu_and_mul, in float32 inside; rows that are not dense are copied first."""

    tier: ClassVar[Tier] = "library"
    needs = AITER

    def refuses(self, op: SiluMul, device: Device) -> Reason | None:
        return _no_vectors(op)

    def rows(self, op: SiluMul, device: Device) -> Rows:
        return (1, rows_within_buffer(4 * op.columns))


@kernel("rocm.quantize", code=f"{CODE}:quantize")
class AiterQuantize(Kernel[Quantize]):
    """aiter's static_per_tensor_quant; it multiplies by 1 / scale, so a code may lie one beside torch's."""

    tier: ClassVar[Tier] = "library"
    needs = AITER

    def refuses(self, op: Quantize, device: Device) -> Reason | None:
        if op.out in ENCODINGS and (reason := feature(op.out.value.replace("float8", "fp8"))(device)):
            return reason
        return _no_vectors(op)

    def rows(self, op: Quantize, device: Device) -> Rows:
        return (1, rows_within_buffer(2 * op.columns))

    def makes(self, op: Quantize) -> tuple[Format, ...]:
        return ENCODINGS
