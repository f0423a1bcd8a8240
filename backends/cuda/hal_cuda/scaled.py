"""Declarations: fp8 times fp8 through cuBLASLt, as torch._scaled_mm calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import FP8, Format
from hal.kernel import Kernel, Tier, kernel
from hal.layout import Layout, Packed, Padded
from hal.ops import Gemm, Linear
from hal.requirement import Reason, Requirement, feature, library, vendor

CODE = "hal_cuda.code.scaled"
FP8_CUBLAS: tuple[Requirement, ...] = (
    vendor("cuda"), feature("fp8_e4m3fn"), library("torch", ">=2.9"), library("cuda")
)  # fmt: skip
ALIGNED = 16  # elements of K and of N: rows of 16 bytes, mandatory in fp8
SCALES = ("channel", "tensor")


@kernel("cuda.scaled_mm", code=f"{CODE}:scaled_mm", serves=(Gemm, Linear))
class ScaledMM(Kernel[Any]):
    """One scale for each row of both sides, or one for all of each; sums in float32 throughout.

    Rows of the weight are padded with zeros to what cuBLASLt wants. A static scale of x beside a
    weight's by rows is repeated for each row of x.
    """

    tier: ClassVar[Tier] = "library"
    needs = FP8_CUBLAS
    quantized = True

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.scheme is None or op.scheme.weight.value != FP8 or op.scheme.weight.scale.per not in SCALES:
            return Reason("op", f"needs a weight in {FP8} with one scale or one a row; it is {op.weight}")
        form = op.scheme.activations
        if form is None or form.value != FP8 or form.scale.per not in ("token", "tensor"):
            return Reason("op", f"needs a scheme that rounds x to {FP8} with one scale or one a row; it is {form}")
        if form.scale.per == "token" and op.scheme.weight.scale.per == "tensor":
            return Reason("op", "needs scales of rows on both sides or on none; x has them, the weight has one")
        if op.columns % ALIGNED:
            return Reason("op", f"needs columns in multiples of {ALIGNED}; {op.columns} leaves {op.columns % ALIGNED}")
        if op.rows % ALIGNED and op.scheme.weight.scale.per == "tensor":
            return Reason("op", f"needs rows in multiples of {ALIGNED} to a single scale; {op.rows} leaves some")
        if op.dtype not in ("bfloat16", "float16"):
            return Reason("op", f"needs bfloat16 or float16; dtype is {op.dtype}")
        return None

    def takes(self, op: Any) -> tuple[Format, ...]:
        return (op.scheme.activations,) if op.scheme and op.scheme.activations else ()

    def reads(self, op: Any, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        layout = Packed() if op.rows % ALIGNED == 0 else Padded(ALIGNED)
        return {"weight": (layout,), "weight_scale": (layout,)}
