"""Declarations: input projections in three layouts, products with plain and with quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import Format, dtype
from hal.kernel import Kernel, Part, Rows, kernel
from hal.layout import Layout, Packed, Padded, Separate
from hal.opening import norm_part
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
        return None


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
        return None


@kernel("torch.separate", code=f"{CODE}:separate")
class SeparateInProj(_InProj, Kernel[InProj]):
    """A GEMM for each part, reading its rows wherever they lie."""

    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"weight": (Separate(),)}
    launches = 6


@kernel("torch.linear", code=f"{CODE}:linear")
class PlainLinear(Kernel[Linear]):
    """``F.linear`` in the op's dtype."""

    needs = TORCH


@kernel("torch.gemm", code=f"{CODE}:linear")
class PlainGemm(Kernel[Gemm]):
    """``F.linear`` in the op's dtype; an output dtype of its own is not served."""

    needs = TORCH


class _Quantized(Kernel[Any]):
    needs = TORCH
    quantized = True

    def refuses(self, op: Any, device: Device) -> Reason | None:
        return None if op.scheme else Reason("op", f"needs a quantized weight; it is {op.weight}")


@kernel("torch.linear_quantized", code=f"{CODE}:linear_quantized", serves=(Gemm, Linear))
class QuantizedLinear(_Quantized):
    """Both factors as the checkpoint rounds them, their real values multiplied in float32."""

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.scheme and op.scheme.activations is None:
            return Reason("op", f"needs a scheme that rounds activations; {op.scheme} does not")
        return super().refuses(op, device)

    def takes(self, op: Any) -> tuple[Format, ...]:
        return (op.scheme.activations,) if op.scheme and op.scheme.activations else ()


@kernel("torch.linear_widened", code=f"{CODE}:linear_widened", serves=(Gemm, Linear))
class WidenedLinear(_Quantized):
    """The weight widened at each call; x as it is, so its rounding of the checkpoint is not done."""

    launches = 2
