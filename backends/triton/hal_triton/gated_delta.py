"""Declarations: the decode core of a Gated DeltaNet layer, in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import STATIC_FP8, Format, Tensor
from hal.kernel import Kernel, Rows, Tier, kernel
from hal.layout import VK, Layout, Ring
from hal.numerics import REASSOCIATED, Numerics
from hal.ops import GatedDeltaDecode
from hal.ops.gated_delta import DeltaSizes
from hal.requirement import Reason
from hal_triton.needs import TRITON, next_power_of_2, overlaps

CODE = "hal_triton.code.gated_delta"
WIDEST = 256  # a head's keys are one row of a program's tile
WAVES = 1  # heads a compute unit up to which V is split


def _common(device: Device) -> Mapping[str, Any]:
    """Each value of the state is used once; ONCE stops CUDA's compiler from repeating loads."""
    return {"num_stages": 1, "ONCE": device.value("vendor") == "cuda", "PDL": overlaps(device)}


def sizes_refused(op: DeltaSizes) -> Reason | None:
    """Why a program cannot hold the rows of a head, or nothing."""
    if op.value_heads % op.key_heads:
        return Reason(
            "op", f"needs value_heads to be a multiple of key_heads; they are {op.value_heads} and {op.key_heads}"
        )
    if max(op.key_head_dim, op.value_head_dim) > WIDEST:
        dims = f"{op.key_head_dim} and {op.value_head_dim}"
        return Reason("op", f"needs head dims of at most {WIDEST}; key and value head dim are {dims}")
    return None


class _Decode(Kernel[Any]):
    tier: ClassVar[Tier] = "fused"
    needs = TRITON

    def refuses(self, op: GatedDeltaDecode, device: Device) -> Reason | None:
        return sizes_refused(op)

    def reads(self, op: GatedDeltaDecode, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {"conv": (Ring(op.conv_width),), "delta": (VK(),)}

    def makes(self, op: GatedDeltaDecode) -> tuple[Format, ...]:
        return (Tensor(op.dtype), STATIC_FP8)

    def numerics(self, op: GatedDeltaDecode) -> Numerics:
        return replace(REASSOCIATED, batch_invariant=True)


@kernel("triton.decode_whole", code=f"{CODE}:decode")
class Decode(_Decode, Kernel[GatedDeltaDecode]):
    """A program a row and value head: the state streams through its registers, block by block."""

    def settings(self, op: GatedDeltaDecode, device: Device) -> Mapping[str, Any]:
        block = min(next_power_of_2(op.value_head_dim), 8)
        return {
            "SPLIT": 1, "BV": block, "DEPTH": 0, "STAGES": 4, "num_warps": 1, "EVICT": "evict_first", **_common(device)
        }  # fmt: skip


@kernel("triton.decode_split", code=f"{CODE}:decode")
class DecodeSplit(_Decode, Kernel[GatedDeltaDecode]):
    """V split over programs, for few rows; the last program of a head does its norm."""

    def refuses(self, op: GatedDeltaDecode, device: Device) -> Reason | None:
        if device.value("compute_units") is None:
            return Reason("device", f"needs compute_units, to know how few rows are; {device.label} has unknown")
        return super().refuses(op, device)

    def rows(self, op: GatedDeltaDecode, device: Device) -> Rows:
        units = device.value("compute_units")
        return (1, max(1, WAVES * units // op.value_heads if isinstance(units, int) else 1))

    def settings(self, op: GatedDeltaDecode, device: Device) -> Mapping[str, Any]:
        # one wave a program: what it wrote lies before its count on any device
        block = min(next_power_of_2(op.value_head_dim), 8)
        most = self.rows(op, device)[1]
        split = next_power_of_2(op.value_head_dim) // block
        return {
            "SPLIT": split, "BV": block, "DEPTH": 1, "STAGES": 1, "num_warps": 1, "EVICT": "evict_first",
            "rows": most, **_common(device),
        }  # fmt: skip
