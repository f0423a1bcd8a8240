"""Declarations: the cores of a Gated DeltaNet layer, in CUDA C++."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from hal_triton.needs import overlaps

from hal.device import Device
from hal.formats import STATIC_FP8, Format, Tensor
from hal.kernel import Kernel, Rows, Tier, kernel
from hal.layout import VK, Layout, Ring
from hal.numerics import REASSOCIATED, Numerics
from hal.ops import GatedDeltaDecode, GatedDeltaVerify
from hal.requirement import Reason
from hal_cuda.needs import cpp, no_bfloat16

CODE = "hal_cuda.code.gated_delta"
# clusters, and cvt to bfloat16 of one value: what the file compiles for
ARCHS = ("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
DIMS = (64, 128)
CONV_WIDTH = 4
WAVES = 1  # heads a compute unit up to which a head is split
CROWD = {"float32": 24, "bfloat16": 4}  # heads a compute unit from which they are a crowd, see `launch`
MOST_QUERIES = 8
LEAST_PART = 32  # rows of the state that a block which verifies takes: each thread of a warp has one in the end
MOST = 8  # rows of the state that a warp holds: more of them measured no faster


def launch(op: GatedDeltaDecode, split: int, warps: int, crowd: bool = False) -> Mapping[str, int]:
    """``split`` blocks a head, of so many warps, each with ROWS rows of the state at a time.

    Where a warp has more rows than that, the next are asked for ahead; but in a crowd of bfloat16 states,
    whose blocks are many at once by themselves. EARLY: the whole part of the state is brought to L2 at
    once, for blocks of a split head, and in a crowd of float32 states.
    """
    rows = op.value_head_dim // split // warps
    plain = crowd and op.state_dtype == "bfloat16"
    return {
        "SPLIT": split,
        "WARPS": warps,
        "ROWS": min(rows, MOST),
        "AHEAD": int(rows > MOST and not plain),
        "EARLY": int(split > 1 or (crowd and not plain)),
        "BLOCKS": 8 if plain else 1,
    }


def common(op: GatedDeltaDecode, device: Device) -> dict[str, Any]:
    """What every kernel's launches share."""
    return {"PDL": overlaps(device), "unaligned": launch(op, 1, 4)}


class _Core(Kernel[Any]):
    tier: ClassVar[Tier] = "fused"
    needs = cpp(*ARCHS)

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if reason := no_bfloat16(op):
            return reason
        if op.value_heads % op.key_heads:
            heads = f"{op.value_heads} and {op.key_heads}"
            return Reason("op", f"needs value_heads to be a multiple of key_heads; they are {heads}")
        if op.key_head_dim not in DIMS or op.value_head_dim not in DIMS:
            dims = f"{op.key_head_dim} and {op.value_head_dim}"
            return Reason("op", f"needs head dims of 64 or 128; key and value head dim are {dims}")
        if op.conv_width != CONV_WIDTH:
            return Reason("op", f"needs conv_width {CONV_WIDTH}; it is {op.conv_width}")
        return None

    def makes(self, op: Any) -> tuple[Format, ...]:
        return (Tensor(op.dtype), STATIC_FP8)


class _Decode(_Core):
    def reads(self, op: GatedDeltaDecode, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {"conv": (Ring(CONV_WIDTH),), "delta": (VK(),)}

    def numerics(self, op: GatedDeltaDecode) -> Numerics:
        return replace(REASSOCIATED, batch_invariant=True)


@kernel("cuda.decode_whole", code=f"{CODE}:decode")
class DecodeWhole(_Decode, Kernel[GatedDeltaDecode]):
    """A block a row and value head, of eight warps; of four in a crowd of bfloat16 states."""

    def settings(self, op: GatedDeltaDecode, device: Device) -> Mapping[str, Any]:
        units = device.value("compute_units")
        few = CROWD[op.state_dtype] * units // op.value_heads if isinstance(units, int) else 0
        found = common(op, device)
        if few:
            found[str(few)] = launch(op, 1, 8)
        return {**found, "more": launch(op, 1, 4 if op.state_dtype == "bfloat16" else 8, crowd=True)}


@kernel("cuda.decode_cluster", code=f"{CODE}:decode")
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
        return {**common(op, device), "more": launch(op, 4, 4)}


def verify_launch(op: GatedDeltaVerify, split: int, across: int, blocks: int = 1) -> Mapping[str, int]:
    """``split`` blocks a head; ``across`` warps share 16 rows of the state: the more, the fewer columns each holds."""
    part = max(LEAST_PART, op.value_head_dim // split)
    across = min(across, op.key_head_dim // 16)
    return {
        "SPLIT": op.value_head_dim // part, "WARPS": part // 16 * across, "ACROSS": across, "EARLY": int(split > 1),
        "BLOCKS": blocks if op.queries <= 4 else 1,
    }  # fmt: skip


@kernel("cuda.verify", code=f"{CODE}:verify")
class Verify(_Core, Kernel[GatedDeltaVerify]):
    """A block a sequence and value head, a cluster of them where those are few; one pass over the state."""

    def refuses(self, op: GatedDeltaVerify, device: Device) -> Reason | None:
        if op.queries > MOST_QUERIES:
            return Reason("op", f"needs at most {MOST_QUERIES} rows of a sequence; queries is {op.queries}")
        return super().refuses(op, device)

    def reads(self, op: GatedDeltaVerify, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {**op.rings(), "delta": (VK(),)}

    def settings(self, op: GatedDeltaVerify, device: Device) -> Mapping[str, Any]:
        units = device.value("compute_units")
        found: dict[str, Any] = {"PDL": overlaps(device), "unaligned": verify_launch(op, 1, 1)}
        if isinstance(units, int) and (most := WAVES * units // op.value_heads):
            found[str(most)] = verify_launch(op, 2, 4)
        return {**found, "more": verify_launch(op, 1, 1, blocks=2)}
