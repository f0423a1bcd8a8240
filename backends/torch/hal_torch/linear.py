"""Declarations: input projections in three layouts, Linear in two formats, Gemm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hal.device import Device
from hal.formats import STATIC_FP8, Format, Quantized, Tensor, dtype
from hal.kernel import Kernel, Part, Rows, kernel
from hal.layout import Layout, Packed, Padded, Separate
from hal.opening import norm_part, one_format
from hal.ops import Gemm, InProj, Linear
from hal.requirement import Reason, Requirement, library

CODE = "hal_torch.code.linear"
TORCH: tuple[Requirement, ...] = (library("torch", ">=2.9"),)
# one wide product beats several narrow ones up to here; above, cuBLAS runs the wide one about
# 10 % slower (27B at TP 4, merged 4120 columns against two products)
WIDE_ROWS = 1024


def aligned(op: InProj, device: Device) -> bool | None:
    """Whether rows of the packed output are multiples of the bytes that the device's GEMMs want."""
    wanted = device.value("gemm_row_bytes")
    return None if wanted is None else sum(p.rows for p in op.parts) * dtype(op.dtype).bits // 8 % wanted == 0


def multiple(op: InProj, device: Device) -> int:
    """Rows that a padded weight is a multiple of, in elements of the op's dtype."""
    wanted: int = device.value("gemm_row_bytes") or 1
    return max(1, wanted * 8 // dtype(op.dtype).bits)


class _InProj(Kernel[InProj]):
    needs = TORCH

    def refuses(self, op: InProj, device: Device) -> Reason | None:
        return one_format(op)

    def parts(self, op: InProj) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}


@kernel("torch.packed", code=f"{CODE}:packed")
class PackedInProj(_InProj, Kernel[InProj]):
    """One GEMM over the rows of all parts; outputs are views of its columns."""

    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"weight": (Packed(),)}

    def refuses(self, op: InProj, device: Device) -> Reason | None:
        if aligned(op, device) is False:
            width = sum(p.rows for p in op.parts)
            size = dtype(op.dtype).bits // 8
            wanted = device.value("gemm_row_bytes")
            return Reason(
                "op",
                f"needs output rows of a multiple of {wanted} bytes; {width} x {size} = {width * size} is none",
            )
        return super().refuses(op, device)


@kernel("torch.padded", code=f"{CODE}:padded")
class PaddedInProj(_InProj, Kernel[InProj]):
    """One GEMM over all parts and rows of zeros up to alignment; the padding's columns are never seen."""

    def reads(self, op: InProj, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {"weight": (Padded(multiple(op, device)),)}

    def rows(self, op: InProj, device: Device) -> Rows:
        return (1, WIDE_ROWS)

    def refuses(self, op: InProj, device: Device) -> Reason | None:
        match aligned(op, device):
            case None:
                return Reason("device", f"needs gemm_row_bytes to pad to; {device.label} has unknown")
            case True:
                width = sum(p.rows for p in op.parts)
                return Reason("op", f"needs a packed width to pad; {width} rows are aligned as they are")
        return super().refuses(op, device)


@kernel("torch.separate", code=f"{CODE}:separate")
class SeparateInProj(_InProj, Kernel[InProj]):
    """A GEMM for each part, reading its rows wherever they lie."""

    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"weight": (Separate(),)}
    launches = 6


@kernel("torch.linear", code=f"{CODE}:linear")
class PlainLinear(Kernel[Linear]):
    """``F.linear`` in the op's dtype."""

    needs = TORCH

    def refuses(self, op: Linear, device: Device) -> Reason | None:
        if op.weight != Tensor(op.dtype):
            return Reason("op", f"needs a weight in {op.dtype}; it is {op.weight}")
        return None


def _static_fp8(op: Linear) -> Reason | None:
    if not isinstance(op.weight, Quantized) or op.weight.scale.per != "tensor":
        return Reason("op", f"needs a weight with one scale; it is {op.weight}")
    return None


@kernel("torch.linear_fp8", code=f"{CODE}:linear_fp8")
class Fp8Linear(Kernel[Linear]):
    """Both factors in fp8 with static scales, widened to float32 for the product."""

    needs = TORCH

    def refuses(self, op: Linear, device: Device) -> Reason | None:
        if not op.input_scale:
            return Reason("op", "needs an input_scale in the checkpoint; there is none")
        return _static_fp8(op)

    def takes(self, op: Linear) -> tuple[Format, ...]:
        return (STATIC_FP8,)


@kernel("torch.linear_widened", code=f"{CODE}:linear_widened")
class WidenedLinear(Kernel[Linear]):
    """The fp8 weight widened at each call; x as it is, so its rounding of the checkpoint is not done."""

    needs = TORCH
    launches = 2

    def refuses(self, op: Linear, device: Device) -> Reason | None:
        return _static_fp8(op)


@kernel("torch.gemm", code=f"{CODE}:linear")
class PlainGemm(Kernel[Gemm]):
    """``F.linear`` in the op's dtype; an output dtype of its own is not served."""

    needs = TORCH

    def refuses(self, op: Gemm, device: Device) -> Reason | None:
        if op.weight != Tensor(op.dtype):
            return Reason("op", f"needs a weight in {op.dtype}; it is {op.weight}")
        return None
