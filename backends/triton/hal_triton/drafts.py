"""Declarations: drafted tokens, in the core of a Gated DeltaNet layer and in attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import STATIC_FP8, Format, Tensor, dtype
from hal.kernel import Kernel, Rows, Tier, kernel
from hal.layout import VK, Layout
from hal.ops import AttentionVerify, GatedDeltaVerify
from hal.requirement import Reason
from hal_triton import archs
from hal_triton.attention import MOST_SPLITS, WAVES, PagedAttention, roomy
from hal_triton.gated_delta import sizes_refused
from hal_triton.needs import TRITON, next_power_of_2, overlaps

CODE = "hal_triton.code.drafts"
MOST_QUERIES = 8  # a program holds the keys of all rows, and of all that are pending
PROGRAMS = 8  # of a wave, that a compute unit has room for; a head is split while there are fewer
ONE_WAVE = 4  # so many in the registers of a wave; the registers of four waves hold more


class _Verify(Kernel[Any]):
    tier: ClassVar[Tier] = "fused"
    needs = TRITON

    def refuses(self, op: GatedDeltaVerify, device: Device) -> Reason | None:
        if op.queries > MOST_QUERIES:
            return Reason("op", f"needs at most {MOST_QUERIES} rows of a sequence; queries is {op.queries}")
        if op.queries > (most := archs.of("verify", device).get("queries", MOST_QUERIES)):
            where = f"{device.label}, whose registers hold no more"
            return Reason("device", f"needs at most {most} rows of a sequence on {where}; queries is {op.queries}")
        if op.key_head_dim % 4:
            return Reason("op", f"needs key_head_dim a multiple of 4; it is {op.key_head_dim}")
        return sizes_refused(op)

    def reads(self, op: GatedDeltaVerify, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {**op.rings(), "delta": (VK(),)}

    def makes(self, op: GatedDeltaVerify) -> tuple[Format, ...]:
        return (Tensor(op.dtype), STATIC_FP8)


def launch(op: GatedDeltaVerify, device: Device, whole: bool) -> dict[str, Any]:
    """Two rows side by side spare exchanges between lanes."""
    value, other = next_power_of_2(op.value_head_dim), archs.of("verify", device)
    split, stages = (1, 3) if whole else (value // min(value, 8), 1)
    block, waves = min(value, other.get("BV", 8)), 1
    if op.queries > ONE_WAVE:
        waves = 4
    elif split == 1:
        waves = other.get("num_warps", 1)
    return {
        "SPLIT": split, "BV": block, "SIDE": min(2, block), "STAGES": stages, "num_warps": waves,
        "PDL": overlaps(device),
    }  # fmt: skip


@kernel("triton.verify_whole", code=f"{CODE}:verify")
class VerifyWhole(_Verify, Kernel[GatedDeltaVerify]):
    """A program a sequence and value head: pending tokens, convolution, delta rule of all rows, norm."""

    def settings(self, op: GatedDeltaVerify, device: Device) -> Mapping[str, Any]:
        return launch(op, device, whole=True)


@kernel("triton.verify_split", code=f"{CODE}:verify")
class VerifySplit(_Verify, Kernel[GatedDeltaVerify]):
    """V split over programs, for few sequences; the last program of a head does its norm."""

    def refuses(self, op: GatedDeltaVerify, device: Device) -> Reason | None:
        if device.value("compute_units") is None:
            return Reason("device", f"needs compute_units, to know how few rows are; {device.label} has unknown")
        if op.queries > ONE_WAVE and device.value("vendor") != "cuda":
            # elsewhere a barrier does not wait until other waves' writes have arrived
            where = f"{device.label} has {device.value('vendor')}"
            return Reason("device", f"needs vendor cuda for {op.queries} rows, which take several waves; {where}")
        return super().refuses(op, device)

    def rows(self, op: GatedDeltaVerify, device: Device) -> Rows:
        return (1, op.queries * max(1, self._programs(device) // (2 * op.value_heads)))

    def settings(self, op: GatedDeltaVerify, device: Device) -> Mapping[str, Any]:
        # one wave where several programs count, so that what it wrote lies before its count; on CUDA more will do
        return {**launch(op, device, whole=False), "programs": self._programs(device)}

    def _programs(self, device: Device) -> int:
        return PROGRAMS * (device.value("compute_units") or 0)


@kernel("triton.attention_verify", code=f"{CODE}:attention")
class TritonAttentionVerify(PagedAttention, Kernel[AttentionVerify]):
    """All rows of a sequence and query heads of a KV head in one program; splits as ``triton.attention_decode``."""

    launches = 2

    def settings(self, op: AttentionVerify, device: Device) -> Mapping[str, Any]:
        wide = roomy(op, device)
        group, rows = next_power_of_2(op.heads // op.kv_heads), next_power_of_2(op.queries)
        rows = max(rows, 16 // group)
        block = 32 if wide or dtype(op.dtype).bits <= 16 else 16
        lanes = device.value("wave_size") or 32
        # sums that a thread holds: 64, and twice as many where it has twice the registers, on gfx9
        waves = group * rows * op.head_dim // (2 * lanes * lanes)
        return {
            "GROUP_BLOCK": group,
            "ROWS": rows,
            "BLOCK_N": min(block, archs.of("attention_decode", device).get("BLOCK_N", block)),
            "programs": WAVES * (device.value("compute_units") or 64),
            "most_splits": MOST_SPLITS,
            "num_warps": min(16, max(4, next_power_of_2(waves))),
            "num_stages": 3 if wide else 1,
            "PDL": overlaps(device),
        }
