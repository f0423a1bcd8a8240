"""Declarations: the decode core of a Gated DeltaNet layer, in CUDA C++."""

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
from hal.requirement import Reason, Requirement, arch, library, vendor

CODE = "hal_cuda.code.gated_delta:decode"
# clusters, and cvt to bfloat16 of one value: what the file compiles for
ARCHS = ("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
NEEDS: tuple[Requirement, ...] = (
    vendor("cuda"),
    arch(*ARCHS),
    library("torch", ">=2.9"),
    library("cuda_bindings", ">=12.8"),
)
DIMS = (64, 128)
CONV_WIDTH = 4
WAVES = 2  # heads a compute unit up to which a head is split


def launch(op: GatedDeltaDecode, device: Device, split: int, warps: int) -> Mapping[str, Any]:
    """Launch settings: ``split`` blocks a head, of so many warps, each with ROWS rows of the state at a time."""
    rows = op.value_head_dim // split // warps
    most = 8 if op.state_dtype == "float32" else 16
    ahead = rows > most
    return {
        "SPLIT": split,
        "WARPS": warps,
        "ROWS": min(rows, most),
        "AHEAD": ahead,
        "BLOCKS": 1,
        "PDL": device.value("pdl") is True,
    }


class _Decode(Kernel[Any]):
    tier: ClassVar[Tier] = "fused"
    needs = NEEDS

    def refuses(self, op: GatedDeltaDecode, device: Device) -> Reason | None:
        if op.dtype != "bfloat16":
            return Reason("op", f"needs bfloat16; dtype is {op.dtype}")
        if op.value_heads % op.key_heads:
            heads = f"{op.value_heads} and {op.key_heads}"
            return Reason("op", f"needs value_heads to be a multiple of key_heads; they are {heads}")
        if op.key_head_dim not in DIMS or op.value_head_dim not in DIMS:
            dims = f"{op.key_head_dim} and {op.value_head_dim}"
            return Reason("op", f"needs head dims of 64 or 128; key and value head dim are {dims}")
        if op.conv_width != CONV_WIDTH:
            return Reason("op", f"needs conv_width {CONV_WIDTH}; it is {op.conv_width}")
        return None

    def reads(self, op: GatedDeltaDecode, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {"conv": (Ring(CONV_WIDTH),), "delta": (VK(),)}

    def makes(self, op: GatedDeltaDecode) -> tuple[Format, ...]:
        return (Tensor(op.dtype), STATIC_FP8)

    def numerics(self, op: GatedDeltaDecode) -> Numerics:
        return replace(REASSOCIATED, batch_invariant=True)


@kernel("cuda.decode_whole", code=CODE)
class DecodeWhole(_Decode, Kernel[GatedDeltaDecode]):
    """A block of four warps a row and value head."""

    def settings(self, op: GatedDeltaDecode, device: Device) -> Mapping[str, Any]:
        return launch(op, device, 1, 4)


@kernel("cuda.decode_cluster", code=CODE)
class DecodeCluster(_Decode, Kernel[GatedDeltaDecode]):
    """A cluster of blocks a row and value head, for few rows; they add up the norm's sum in shared memory."""

    def refuses(self, op: GatedDeltaDecode, device: Device) -> Reason | None:
        if device.value("compute_units") is None:
            return Reason("device", f"needs compute_units, to know how few rows are; {device.label} has unknown")
        return super().refuses(op, device)

    def rows(self, op: GatedDeltaDecode, device: Device) -> Rows:
        units = device.value("compute_units")
        return (1, max(1, WAVES * units // op.value_heads if isinstance(units, int) else 1))

    def settings(self, op: GatedDeltaDecode, device: Device) -> Mapping[str, Any]:
        return launch(op, device, 4, 4)
