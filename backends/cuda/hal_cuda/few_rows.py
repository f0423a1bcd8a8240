"""Declarations: products with few rows on Hopper, in CUDA C++."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, ClassVar

from hal_triton.needs import overlaps

from hal.device import Device
from hal.kernel import Kernel, Part, Rows, Tier, kernel
from hal.layout import Layout, Packed
from hal.numerics import Class, Numerics
from hal.opening import norm_part
from hal.ops import Gemm, InProj, Linear, NormGateUp
from hal.requirement import Reason
from hal_cuda.needs import cpp, no_bfloat16

CODE = "hal_cuda.code.few_rows"
LEAST = 3  # rows: below, multiplying and adding without matrix instructions measured faster
WIDTHS = (8, 16, 32, 64)  # rows of x in one instruction
TALL = 16384  # rows of the weight up to which x, read by every block, is worth 64 rows
TILE = 64  # rows of the weight a group multiplies
BOX = 64  # elements of K in a stage
STEPS = 8  # of a block, at least
# blocks that share K, and how many blocks a multiprocessor there may be then: wide clusters leave gaps
CLUSTERS = ((2, 3), (4, 2), (8, 2.6))
RESERVED = 1024  # bytes of shared memory that a block takes beside what it asks for, twice


def tiles(outputs: int, columns: int, device: Device, gated: bool = False) -> Mapping[str, Any]:
    """Launch settings by width, as measured on an H200.

    SPLIT blocks, a cluster, share K where the weight has too few rows for all multiprocessors, each of
    them STEPS steps or more. As many blocks as it takes run at once on a multiprocessor, up to three; no
    block more has room there (SHARED), or some multiprocessors would have none. Blocks that are many by
    themselves ask for four stages, the others for as many as fit; very many take twice the rows.
    """
    units, memory = device.value("compute_units") or 132, device.value("shared_bytes") or 232448
    groups = 2 if outputs >= 32768 else 1
    blocks = -(-outputs * (2 if gated else 1) // (TILE * groups))
    steps = -(-columns // BOX)
    split = 1
    for wider, most in () if gated else CLUSTERS:
        # the last block of a cluster has a share too
        if blocks * wider <= most * units and steps >= STEPS * wider and -(-steps // wider) * (wider - 1) < steps:
            split = wider
    each = -(-steps // split)
    # clusters of four and more do not fill all places
    at_once = min(ceil(blocks * split / (units if split < 4 else 0.9 * units)), 4 - groups)
    room = memory // at_once - 2 * RESERVED
    found: dict[str, Any] = {"PDL": overlaps(device)}
    for width in WIDTHS:
        stage = (TILE * groups + width) * BOX * 2
        most = room // stage
        stages = most if split > 1 or groups > 1 or width > 16 else 4
        found[str(width)] = {
            "GROUPS": groups,
            "SPLIT": split,
            "STAGES": max(2, min(stages, most, 8, each + 1)),
            "BOXES": 1,
            "SHARED": memory // (at_once + 1) if at_once < 3 else 0,
        }
    return found


class _Few(Kernel[Any]):
    tier: ClassVar[Tier] = "fused"
    needs = cpp("sm_90")  # wgmma is an instruction of this architecture alone

    def refuses(self, op: Any, device: Device) -> Reason | None:
        return no_bfloat16(op)

    def numerics(self, op: Any) -> Numerics:
        return Numerics(Class.REASSOCIATED, batch_invariant=True)


def _columns(columns: int, name: str) -> Reason | None:
    if columns % 8:
        return Reason("op", f"needs {name} to be a multiple of 8, rows of 16 bytes; it is {columns}")
    return None


def _most(rows: int) -> Rows:
    return (LEAST, WIDTHS[-1] if rows <= TALL else WIDTHS[-2])


@kernel("cuda.gemm_few", code=f"{CODE}:gemm", serves=(Gemm, Linear))
class GemmFew(_Few):
    """Matrix instructions with the weight as the long side; the copy engine keeps tiles of it under way."""

    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"weight": (Packed(),)}

    def rows(self, op: Any, device: Device) -> Rows:
        return _most(op.rows)

    def refuses(self, op: Any, device: Device) -> Reason | None:
        return super().refuses(op, device) or _columns(op.columns, "columns")

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        return tiles(op.rows, op.columns, device)


@kernel("cuda.in_proj_few", code=f"{CODE}:in_proj")
class InProjFew(_Few, Kernel[InProj]):
    """The norm, then the product of `gemm_few` over the rows of all parts, wherever they lie packed."""

    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"weight": (Packed(),)}

    def rows(self, op: InProj, device: Device) -> Rows:
        return _most(sum(op.outputs().values()))

    def refuses(self, op: InProj, device: Device) -> Reason | None:
        return super().refuses(op, device) or _columns(op.hidden, "hidden")

    def parts(self, op: InProj) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}

    def settings(self, op: InProj, device: Device) -> Mapping[str, Any]:
        return tiles(sum(op.outputs().values()), op.hidden, device)


@kernel("cuda.norm_gate_up_few", code=f"{CODE}:norm_gate_up")
class NormGateUpFew(_Few, Kernel[NormGateUp]):
    """The norm, then the product of `gemm_few`, eight rows of gate and of up in turn, multiplied where they are."""

    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"gate_up": (Packed(),)}

    def rows(self, op: NormGateUp, device: Device) -> Rows:
        return _most(2 * op.intermediate)

    def refuses(self, op: NormGateUp, device: Device) -> Reason | None:
        return super().refuses(op, device) or _columns(op.hidden, "hidden") or _columns(op.intermediate, "intermediate")

    def parts(self, op: NormGateUp) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}

    def settings(self, op: NormGateUp, device: Device) -> Mapping[str, Any]:
        return tiles(op.intermediate, op.hidden, device, gated=True)
