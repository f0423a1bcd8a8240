"""Declarations: mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import dtype
from hal.kernel import Kernel, Part, Rows, Tier, kernel
from hal.numerics import Class, Numerics
from hal.opening import norm_part
from hal.ops import MoE
from hal_triton import archs
from hal_triton.needs import TRITON, next_power_of_2, overlaps

CODE = "hal_triton.code.moe"
FEW_ROWS = 8  # above, experts are chosen twice often enough to be read once for all their rows
SOME_ROWS = 128  # above, comparing every pair with every other costs more than a sort
ROOMY = 128 * 1024


class _MoE(Kernel[MoE]):
    tier: ClassVar[Tier] = "portable"
    needs = TRITON

    def parts(self, op: MoE) -> Mapping[str, Part]:
        return {"norm": norm_part(op)}


@kernel("triton.moe_few", code=f"{CODE}:few")
class TritonMoEFew(_MoE, Kernel[MoE]):
    """A program per row, expert and block of outputs, whole rows of weights at a time; the shared
    expert is one more. Three launches, with the norm; one more where that reduces over ranks, one on AMD."""

    launches = 4

    def rows(self, op: MoE, device: Device) -> Rows:
        return (1, FEW_ROWS)

    def parts(self, op: MoE) -> Mapping[str, Part]:
        return super().parts(op) if op.world > 1 else {}

    def numerics(self, op: MoE) -> Numerics:
        # the normed row, the activation
        return Numerics(Class.REASSOCIATED, roundings=2)

    def settings(self, op: MoE, device: Device) -> Mapping[str, Any]:
        elements = 4096 * 2 // (dtype(op.dtype).bits // 8)  # of weights, that a program holds at a time

        def launch(outputs: int, columns: int) -> Mapping[str, int]:
            block = min(next_power_of_2(columns), elements // outputs)
            return {"BLOCK_N": outputs, "BLOCK_K": block, "PDL": overlaps(device), "num_warps": 4, "num_stages": 3}

        row, widest = next_power_of_2(op.hidden), max(op.intermediate, op.shared_intermediate)
        return {
            # the norm is over a whole row; where barriers do not wait for stores, as AMD's, others choose
            "opening": {
                **launch(max(1, min(4, elements // row)), row), "BLOCK_K": row,
                "CHOOSE": device.value("vendor") == "cuda",
            },
            "gate_up": launch(4, op.hidden),
            "down": launch(archs.of("moe_down", device).get("BLOCK_N", 8), widest),
            "rows": FEW_ROWS,
        }  # fmt: skip


class _Grouped(_MoE):
    def numerics(self, op: MoE) -> Numerics:
        # the normed row, the activation, each expert's value
        return Numerics(Class.REASSOCIATED, roundings=3)

    def tile(self, rows: int, op: MoE, device: Device) -> Mapping[str, Any]:
        """Launch settings for tiles of so many rows."""
        wide = dtype(op.dtype).bits <= 16
        roomy = wide and (device.value("shared_bytes") or 0) >= ROOMY
        return {
            "BLOCK_M": rows if wide else min(rows, 32),
            "BLOCK_N": 64 if rows >= 64 and wide else 32,
            "BLOCK_K": (128 if rows < 64 else 64) if roomy else 32,
            "num_warps": 8 if rows >= 64 and roomy else 4,
            "num_stages": 4 if roomy else 1,
        }


@kernel("triton.moe_some", code=f"{CODE}:some")
class TritonMoESome(_Grouped, Kernel[MoE]):
    """Tiles of 16 rows of one expert, grouped by one launch that compares every choice with every other."""

    launches = 7

    def rows(self, op: MoE, device: Device) -> Rows:
        return (1, SOME_ROWS)

    def settings(self, op: MoE, device: Device) -> Mapping[str, Any]:
        return self.tile(16, op, device)


@kernel("triton.moe", code=f"{CODE}:sorted_by_expert")
class TritonMoE(_Grouped, Kernel[MoE]):
    """Tiles of 64 rows of one expert, grouped by a stable sort on the device."""

    launches = 16

    def settings(self, op: MoE, device: Device) -> Mapping[str, Any]:
        return self.tile(64, op, device)
