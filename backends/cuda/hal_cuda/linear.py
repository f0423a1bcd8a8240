"""Declarations: cuBLAS, with its rule that rows of 16 bytes get its fast kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import dtype
from hal.kernel import Kernel, Part, Rows, Tier, kernel
from hal.layout import Layout, Packed, Padded
from hal.opening import norm_part
from hal.ops import Gemm, InProj, Linear
from hal.requirement import Reason, Requirement, library, vendor

CODE = "hal_cuda.code.linear"
CUBLAS: tuple[Requirement, ...] = (vendor("cuda"), library("torch", ">=2.9"), library("cuda"))
MANY = 9  # rows from which cuBLAS is as fast as reading the weight by hand; below it costs 2 to 3 us more
PADDED_ROWS = 64  # of 8, 64 and 128, an H200 likes 64 best: 0.55 / 0.69 / 0.84 of the pair's time


class _InProj(Kernel[InProj]):
    tier: ClassVar[Tier] = "library"
    needs = CUBLAS

    def rows(self, op: InProj, device: Device) -> Rows:
        return (MANY, None)

    def parts(self, op: InProj) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}


def row_bytes(op: InProj) -> int:
    """Bytes of one row of the packed result."""
    return sum(p.rows for p in op.parts) * dtype(op.dtype).bits // 8


@kernel("cuda.packed", code=f"{CODE}:packed")
class CublasPacked(_InProj, Kernel[InProj]):
    """One product over all parts; rows that are no multiple of what cuBLAS wants are padded with zeros."""

    def refuses(self, op: InProj, device: Device) -> Reason | None:
        if device.value("gemm_row_bytes") is None:
            return Reason("device", f"needs gemm_row_bytes to know whether to pad; {device.label} has unknown")
        return super().refuses(op, device)

    def reads(self, op: InProj, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        aligned = row_bytes(op) % (device.value("gemm_row_bytes") or 1) == 0
        return {"weight": (Packed() if aligned else Padded(PADDED_ROWS),)}


@kernel("cuda.pair", code=f"{CODE}:pair")
class CublasPair(_InProj, Kernel[InProj]):
    """Two products over row views of one buffer: wide outputs, narrow outputs."""

    launches = 2


@kernel("cuda.pair_overlapped", code=f"{CODE}:pair_overlapped")
class CublasPairOverlapped(_InProj, Kernel[InProj]):
    """The narrow product on a second stream; worth its two events only inside a captured graph."""

    launches = 4


class _Gemm(Kernel[Any]):
    tier: ClassVar[Tier] = "library"
    needs = CUBLAS

    def rows(self, op: Any, device: Device) -> Rows:
        return (MANY, None)


@kernel("cuda.linear", code=f"{CODE}:linear")
class CublasLinear(_Gemm, Kernel[Linear]):
    """cuBLAS, from where it is as fast as any."""


@kernel("cuda.gemm", code=f"{CODE}:linear")
class CublasGemm(_Gemm, Kernel[Gemm]):
    """cuBLAS, from where it is as fast as any."""
