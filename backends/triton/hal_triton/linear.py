"""Declarations: products with few rows, where reading the weight is all the time there is."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import Tensor
from hal.kernel import Kernel, Rows, Tier, kernel
from hal.layout import Layout, Packed
from hal.numerics import Class, Numerics
from hal.ops import Gemm, Linear
from hal.requirement import Reason
from hal_triton.needs import TRITON, cdiv, next_power_of_2

CODE = "hal_triton.code.linear"
DTYPES = ("bfloat16", "float16")
ONE, FEW, SOME = 4, 16, 128  # most rows of each kernel
LEAST_SHARED = 49152  # bytes of shared memory where they are unknown
SPLITS = (1, 2, 3, 4, 5, 6, 8)
FULL = 0.85  # of the compute units' time in the last wave; with this much, more splits are not worth it


def filled(programs: int, device: Device) -> float:
    """Share of the compute units' time that so many equal programs use."""
    waves = programs / (device.value("compute_units") or 1)
    return waves / ceil(waves)


def columns_at_once(op: Any, device: Device) -> tuple[int, int]:
    """(BLOCK_K, warps): a warp reads 16 bytes a thread of one row; as many warps side by side as divide K."""
    wave = 8 * (device.value("wave_size") or 32)
    fits = [warps for warps in (4, 2, 1) if op.columns % (wave * warps) == 0]
    least = max(1, min(4, next_power_of_2(cdiv(op.columns, wave))))
    warps = fits[0] if fits else least
    return wave * warps, warps


def divided(op: Any, device: Device, blocks: tuple[int, ...], splits: tuple[int, ...]) -> tuple[int, int]:
    """(BLOCK_N, SPLIT): the fewest splits, then the tallest block, that keep the device full; else the fullest."""
    found = [(block, split) for split in splits for block in blocks]
    shares = [filled(cdiv(op.rows, block) * split, device) for block, split in found]
    good = [pair for pair, share in zip(found, shares, strict=True) if share >= FULL]
    return good[0] if good else found[shares.index(max(shares))]


class _Product(Kernel[Any]):
    tier: ClassVar[Tier] = "portable"
    needs = TRITON
    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"weight": (Packed(),)}

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.dtype not in DTYPES:
            return Reason("op", f"needs {' or '.join(DTYPES)}; dtype is {op.dtype}")
        if op.weight != Tensor(op.dtype):
            return Reason("op", f"needs a weight in {op.dtype}; it is {op.weight}")
        if op.x != Tensor(op.dtype):
            return Reason("op", f"needs x in {op.dtype}; it is {op.x}")
        return None


@kernel("triton.gemm_one", code=f"{CODE}:one", serves=(Gemm, Linear))
class GemmOne(_Product):
    """Multiply and add in float32, no matrix instructions: for a row or four."""

    def rows(self, op: Any, device: Device) -> Rows:
        return (1, ONE)

    def numerics(self, op: Any) -> Numerics:
        return Numerics(Class.REASSOCIATED, batch_invariant=True)

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        block_k, warps = columns_at_once(op, device)
        block_n, _ = divided(op, device, (8, 4, 2), (1,))
        return {"BLOCK_N": block_n, "BLOCK_K": block_k, "DEPTH": 1, "PDL": False, "num_warps": warps}


class _Tiled(_Product):
    most: ClassVar[int]  # rows of the widest tile of x
    deepest: ClassVar[int]

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        block_n, split = divided(op, device, (64, 32, 16), SPLITS)
        block_k = min(self.deepest, max(16, next_power_of_2(op.columns)))
        room = (device.value("shared_bytes") or LEAST_SHARED) // (2 * (block_n + self.most))
        while block_k > 16 and room < 2 * block_k:
            block_k //= 2
        return {
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "SPLIT": split,
            "DEPTH": 0,
            "PDL": False,
            "num_warps": 4,
            "num_stages": max(1, min(4, room // block_k)),
        }


@kernel("triton.gemm_few", code=f"{CODE}:few", serves=(Gemm, Linear))
class GemmFew(_Tiled):
    """Matrix instructions along N, x padded to 16 rows; K is split where N alone cannot fill the device."""

    most, deepest = FEW, 256

    def rows(self, op: Any, device: Device) -> Rows:
        return (1, FEW)

    def numerics(self, op: Any) -> Numerics:
        return Numerics(Class.REASSOCIATED, batch_invariant=True)


@kernel("triton.gemm_some", code=f"{CODE}:few", serves=(Gemm, Linear))
class GemmSome(_Tiled):
    """The same with x in one tile of 32, 64 or 128 rows."""

    most, deepest = SOME, 64

    def rows(self, op: Any, device: Device) -> Rows:
        return (FEW + 1, SOME)
