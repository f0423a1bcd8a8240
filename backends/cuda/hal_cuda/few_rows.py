"""Declarations: products with few rows, or dozens, on Hopper, in CUDA C++."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import Tensor
from hal.kernel import Kernel, Part, Rows, Tier, kernel
from hal.layout import Layout, Packed
from hal.numerics import Class, Numerics
from hal.opening import norm_part, one_format
from hal.ops import Gemm, InProj, Linear, NormGateUp
from hal.requirement import Reason, Requirement, arch, library, vendor

CODE = "hal_cuda.code.few_rows"
NEEDS: tuple[Requirement, ...] = (
    vendor("cuda"),
    arch("sm_90"),  # wgmma is an instruction of this architecture alone
    library("torch", ">=2.9"),
    library("cuda_bindings", ">=12.8"),
)
LEAST = 3  # rows: below, multiplying and adding without matrix instructions measured faster
FEW = (8, 16, 32)  # most rows of each launch
DOZENS = (64, 128)
TALL = 65536  # rows of the weight from which cuBLAS is as fast for dozens of rows
BOX = 64  # elements of K in a stage
RESERVED = 2048  # bytes of shared memory that a block takes beside its stages
UNITS, SHARED = 132, 232448  # where the device does not say


def few(outputs: int, columns: int, device: Device, gated: bool = False) -> Mapping[str, Any]:
    """Launches by most rows, as measured on an H200: three blocks at once on a multiprocessor.

    SPLIT blocks share K where the weight has too few rows for that. Blocks that are many by
    themselves ask for four stages, the others for as many as fit; very many take twice the rows.
    """
    units = device.value("compute_units") or UNITS
    groups = 2 if outputs >= 32768 else 1
    room = (device.value("shared_bytes") or SHARED) // (4 - groups) - RESERVED
    blocks = -(-outputs * (2 if gated else 1) // (64 * groups))
    steps = -(-columns // BOX)
    split = 1
    while not gated and split < 8 and blocks * split * 2 <= 3 * units and steps >= 8 * split:
        split *= 2
    split, each = _shares(steps, split)
    found: dict[str, Any] = {"PDL": device.value("pdl") is True}
    for rows in FEW:
        most = room // ((64 * groups + rows) * BOX * 2)
        stages = most if split > 1 or groups > 1 or rows > 16 else 4
        found[str(rows)] = {
            "LONG": 0,
            "WIDTH": rows,
            "CHUNKS": 1,
            "GROUPS": groups,
            "SPLIT": split,
            "STAGES": max(2, min(stages, most, 8, each + 1)),
        }
    return found


def dozens(outputs: int, columns: int, device: Device, gated: bool = False) -> Mapping[str, Any]:
    """Launches by most rows: one block a multiprocessor, all of the same size.

    Of the ways to share K that need the fewest rounds, the one whose blocks read the fewest bytes, x included.
    """
    units = device.value("compute_units") or UNITS
    room = (device.value("shared_bytes") or SHARED) - RESERVED
    steps, wide = -(-columns // BOX), outputs * (2 if gated else 1)
    ways = []
    for wanted in (1,) if gated else (1, 2, 4, 8):
        split, each = _shares(steps, wanted)
        slots = units // split
        waves = -(-wide // (slots * 256))
        tile = -(-wide // (slots * waves * 16)) * 16
        ways.append((waves, (tile + DOZENS[0]) * each, split, tile, each))
    _, _, split, tile, each = min(ways)
    found: dict[str, Any] = {"PDL": device.value("pdl") is True}
    for rows in DOZENS:
        width = 32 if tile % 32 == 0 else 16
        found[str(rows)] = {
            "LONG": 1,
            "WIDTH": width,
            "CHUNKS": tile // width,
            "GROUPS": rows // 64,
            "SPLIT": split,
            "STAGES": max(2, min(room // ((tile + rows) * BOX * 2), 8, each + 1)),
        }
    return found


def _shares(steps: int, split: int) -> tuple[int, int]:
    """How many blocks share so many steps, none without any, and the steps of each."""
    while -(-steps // split) * (split - 1) >= steps:
        split //= 2
    return split, -(-steps // split)


class _Few(Kernel[Any]):
    tier: ClassVar[Tier] = "fused"
    needs = NEEDS

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.dtype != "bfloat16":
            return Reason("op", f"needs bfloat16; dtype is {op.dtype}")
        return None

    def numerics(self, op: Any) -> Numerics:
        return Numerics(Class.REASSOCIATED, batch_invariant=True)


def _columns(columns: int, name: str) -> Reason | None:
    if columns % 8:
        return Reason("op", f"needs {name} to be a multiple of 8, rows of 16 bytes; it is {columns}")
    return None


class _Gemm(_Few):
    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"weight": (Packed(),)}

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.weight != Tensor(op.dtype):
            return Reason("op", f"needs a weight in {op.dtype}; it is {op.weight}")
        return super().refuses(op, device) or _columns(op.columns, "columns")


@kernel("cuda.gemm_few", code=f"{CODE}:gemm", serves=(Gemm, Linear))
class GemmFew(_Gemm):
    """Matrix instructions with the weight as the long side; the copy engine keeps tiles of it under way."""

    def rows(self, op: Any, device: Device) -> Rows:
        return (LEAST, FEW[-1])

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        return few(op.rows, op.columns, device)


@kernel("cuda.gemm_dozens", code=f"{CODE}:gemm", serves=(Gemm, Linear))
class GemmDozens(_Gemm):
    """The same with x as the side of 64 rows, and a block for each multiprocessor."""

    def rows(self, op: Any, device: Device) -> Rows:
        return (FEW[-1] + 1, DOZENS[-1])

    def refuses(self, op: Any, device: Device) -> Reason | None:
        return super().refuses(op, device) or _not_tall(op.rows)

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        return dozens(op.rows, op.columns, device)


def _not_tall(rows: int) -> Reason | None:
    if rows >= TALL:
        return Reason("op", f"needs a weight of less than {TALL} rows; it has {rows}")
    return None


class _InProj(_Few):
    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"weight": (Packed(),)}

    def refuses(self, op: InProj, device: Device) -> Reason | None:
        return super().refuses(op, device) or one_format(op) or _columns(op.hidden, "hidden")

    def parts(self, op: InProj) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}


@kernel("cuda.in_proj_few", code=f"{CODE}:in_proj")
class InProjFew(_InProj, Kernel[InProj]):
    """The norm, then the product of `gemm_few` over the rows of all parts, wherever they lie packed."""

    def rows(self, op: InProj, device: Device) -> Rows:
        return (LEAST, FEW[-1])

    def settings(self, op: InProj, device: Device) -> Mapping[str, Any]:
        return few(sum(op.outputs().values()), op.hidden, device)


@kernel("cuda.in_proj_dozens", code=f"{CODE}:in_proj")
class InProjDozens(_InProj, Kernel[InProj]):
    """The norm, then the product of `gemm_dozens`."""

    def rows(self, op: InProj, device: Device) -> Rows:
        return (FEW[-1] + 1, DOZENS[-1])

    def settings(self, op: InProj, device: Device) -> Mapping[str, Any]:
        return dozens(sum(op.outputs().values()), op.hidden, device)


class _NormGateUp(_Few):
    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"gate_up": (Packed(),)}

    def refuses(self, op: NormGateUp, device: Device) -> Reason | None:
        return super().refuses(op, device) or _columns(op.hidden, "hidden") or _columns(op.intermediate, "intermediate")

    def parts(self, op: NormGateUp) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}


@kernel("cuda.norm_gate_up_few", code=f"{CODE}:norm_gate_up")
class NormGateUpFew(_NormGateUp, Kernel[NormGateUp]):
    """The norm, then the product of `gemm_few`, eight rows of gate and of up in turn, multiplied where they are."""

    def rows(self, op: NormGateUp, device: Device) -> Rows:
        return (LEAST, FEW[-1])

    def settings(self, op: NormGateUp, device: Device) -> Mapping[str, Any]:
        return few(op.intermediate, op.hidden, device, gated=True)


@kernel("cuda.norm_gate_up_dozens", code=f"{CODE}:norm_gate_up")
class NormGateUpDozens(_NormGateUp, Kernel[NormGateUp]):
    """The norm, then the product of `gemm_dozens` with gate and up multiplied where they are."""

    def rows(self, op: NormGateUp, device: Device) -> Rows:
        return (FEW[-1] + 1, DOZENS[-1])

    def settings(self, op: NormGateUp, device: Device) -> Mapping[str, Any]:
        return dozens(op.intermediate, op.hidden, device, gated=True)
