"""Declarations: products with few rows, where reading the weight is all the time there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import Tensor
from hal.kernel import Kernel, Part, Rows, Tier, kernel
from hal.layout import Layout, Packed
from hal.numerics import Class, Numerics
from hal.opening import norm_part
from hal.ops import Gemm, InProj, Linear, NormGateUp, NormLinear
from hal.requirement import Reason
from hal_triton import archs
from hal_triton.needs import TRITON, cdiv, next_power_of_2, overlaps

CODE = "hal_triton.code.linear"
DTYPES = ("bfloat16", "float16")
ONE, FEW = 2, 8  # most rows of each kernel; at 16 rows whole steps ran faster with cuBLAS on an H200
LEAST_SHARED = 49152  # bytes of shared memory where they are unknown


def columns_at_once(columns: int, device: Device) -> tuple[int, int]:
    """(BLOCK_K, warps): a warp reads 16 bytes a thread of one row; as many warps side by side as divide K."""
    wave = 8 * (device.value("wave_size") or 32)
    fits = [warps for warps in (4, 2, 1) if columns % (wave * warps) == 0]
    least = max(1, min(4, next_power_of_2(cdiv(columns, wave))))
    warps = fits[0] if fits else least
    return wave * warps, warps


class _Product(Kernel[Any]):
    tier: ClassVar[Tier] = "portable"
    needs = TRITON
    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"weight": (Packed(),)}

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.dtype not in DTYPES:
            return Reason("op", f"needs {' or '.join(DTYPES)}; dtype is {op.dtype}")
        if op.x != Tensor(op.dtype):
            return Reason("op", f"needs x in {op.dtype}; it is {op.x}")
        return None


def one_settings(rows: int, columns: int, device: Device) -> Mapping[str, Any]:
    """Launch settings of ``one`` for a weight ``[rows, columns]``."""
    block_k, warps = columns_at_once(columns, device)
    if warps == 4:
        # measured on an H200: deep prefetch for small weights, taller blocks for large ones
        block_n, depth = (8, 1) if rows * columns > 4e7 else (4, 2)
    else:
        block_n, depth = (4, 1) if rows > 16384 else (4, 2)
    other = archs.of("gemm_one", device)
    block_n, most = min(block_n, other.get("BLOCK_N", block_n)), min(warps, other.get("num_warps", warps))
    block_k, warps = block_k // warps * most, most
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "DEPTH": depth, "PDL": overlaps(device), "num_warps": warps}


def few_settings(rows: int, columns: int, device: Device) -> Mapping[str, Any]:
    """Launch settings of ``few`` for a weight ``[rows, columns]``."""
    tall = rows >= 8192
    block_n = 64 if tall else 32
    block_k = min(128 if tall else 256, max(16, next_power_of_2(columns)))
    block_k = min(block_k, archs.of("gemm_few", device).get("BLOCK_K", block_k))
    room = (device.value("shared_bytes") or LEAST_SHARED) // (2 * (block_n + 16))
    while block_k > 16 and room < 2 * block_k:
        block_k //= 2
    return {
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLIT": 3 if not tall and columns >= 8192 else 1,
        "DEPTH": 0,
        "PDL": overlaps(device),
        "num_warps": 4,
        "num_stages": max(1, min(5 if tall else 4, room // block_k)),
    }


class _Few(_Product):
    def numerics(self, op: Any) -> Numerics:
        return Numerics(Class.REASSOCIATED, batch_invariant=True)


@kernel("triton.gemm_one", code=f"{CODE}:one", serves=(Gemm, Linear))
class GemmOne(_Few):
    """Multiply and add in float32, no matrix instructions: for a row or two."""

    def rows(self, op: Any, device: Device) -> Rows:
        return (1, ONE)

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        return one_settings(op.rows, op.columns, device)


@kernel("triton.gemm_few", code=f"{CODE}:few", serves=(Gemm, Linear))
class GemmFew(_Few):
    """Matrix instructions along N, x padded to 16 rows; K is split where N alone cannot fill the device."""

    def rows(self, op: Any, device: Device) -> Rows:
        return (ONE + 1, FEW)

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        return few_settings(op.rows, op.columns, device)


class _Opening(Kernel[Any]):
    """A layer's opening: its weights in one format, packed."""

    tier: ClassVar[Tier] = "portable"
    needs = TRITON

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.dtype not in DTYPES:
            return Reason("op", f"needs {' or '.join(DTYPES)}; dtype is {op.dtype}")
        return None

    def parts(self, op: Any) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}


class _OpeningOne(_Opening):
    """Add, norm and product in one launch, for a row or two; over several ranks the norm is a part."""

    def rows(self, op: Any, device: Device) -> Rows:
        return (1, ONE)

    def parts(self, op: Any) -> Mapping[str, Part]:
        return super().parts(op) if op.world > 1 else {}


WEIGHT: Mapping[str, tuple[Layout, ...]] = {"weight": (Packed(),)}


@kernel("triton.in_proj_one", code=f"{CODE}:in_proj_one")
class InProjOne(_OpeningOne, Kernel[InProj]):
    """The product of `gemm_one` over the rows of all parts, wherever they lie packed, with its own norm."""

    layouts = WEIGHT

    def settings(self, op: InProj, device: Device) -> Mapping[str, Any]:
        return one_settings(sum(op.outputs().values()), op.hidden, device)


@kernel("triton.norm_linear_one", code=f"{CODE}:norm_linear_one")
class NormLinearOne(_OpeningOne, Kernel[NormLinear]):
    """The product of `gemm_one` with its own norm."""

    layouts = WEIGHT

    def settings(self, op: NormLinear, device: Device) -> Mapping[str, Any]:
        return one_settings(op.width, op.hidden, device)


@kernel("triton.norm_gate_up_one", code=f"{CODE}:norm_gate_up_one")
class NormGateUpOne(_OpeningOne, Kernel[NormGateUp]):
    """The product of `gemm_one` with its own norm; a program has the same rows of gate and up, and multiplies."""

    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"gate_up": (Packed(),)}

    def settings(self, op: NormGateUp, device: Device) -> Mapping[str, Any]:
        return one_settings(2 * op.intermediate, op.hidden, device)


@kernel("triton.in_proj_few", code=f"{CODE}:in_proj_few")
class InProjFew(_Opening, Kernel[InProj]):
    """The norm, then the product of `gemm_few` over the rows of all parts, wherever they lie packed."""

    layouts = WEIGHT

    def rows(self, op: InProj, device: Device) -> Rows:
        return (ONE + 1, FEW)

    def settings(self, op: InProj, device: Device) -> Mapping[str, Any]:
        return few_settings(sum(op.outputs().values()), op.hidden, device)
