"""Declarations: attention over KV pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import STATIC_FP8, Format, Tensor, dtype
from hal.kernel import Kernel, Tier, kernel
from hal.numerics import Class, Numerics
from hal.ops import AttentionDecode, AttentionPrefill
from hal.requirement import Reason
from hal_triton import archs
from hal_triton.needs import TRITON, next_power_of_2, overlaps

CODE = "hal_triton.code.attention"
WIDEST_HEAD = 256
ROOMY = 160 * 1024  # bytes of shared memory that hold two stages of wide tiles
WAVES = 2  # programs per compute unit that decode aims for
MOST_SPLITS = 64


class PagedAttention(Kernel[Any]):
    tier: ClassVar[Tier] = "portable"
    needs = TRITON

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.head_dim > WIDEST_HEAD or op.head_dim < 16 or op.head_dim & (op.head_dim - 1):
            return Reason("op", f"needs head_dim a power of two from 16 to {WIDEST_HEAD}; it is {op.head_dim}")
        if op.heads % op.kv_heads:
            return Reason("op", f"needs heads to be a multiple of kv_heads; they are {op.heads} and {op.kv_heads}")
        return None

    def makes(self, op: Any) -> tuple[Format, ...]:
        return (Tensor(op.dtype), STATIC_FP8)

    def numerics(self, op: Any) -> Numerics:
        # the weights of the softmax, as operands of a product
        return Numerics(Class.REASSOCIATED, roundings=0 if op.dtype == "float32" else 1)


def roomy(op: Any, device: Device) -> bool:
    """Whether wide tiles in two stages fit into shared memory."""
    return (device.value("shared_bytes") or 0) >= ROOMY and dtype(op.dtype).bits <= 16


@kernel("triton.attention_decode", code=f"{CODE}:decode")
class TritonAttentionDecode(PagedAttention, Kernel[AttentionDecode]):
    """All query heads of a KV head in one program, keys split over a fixed grid; then one launch joins the splits.

    How many splits follows from the rows alone, lengths are read on the device: a captured
    graph serves any lengths. Many rows are not split, and need no second launch.
    """

    launches = 2

    def settings(self, op: AttentionDecode, device: Device) -> Mapping[str, Any]:
        wide, narrow = roomy(op, device), dtype(op.dtype).bits <= 16
        block = archs.of("attention_decode", device).get("BLOCK_N", 32) if narrow else 16
        return {
            "GROUP_BLOCK": max(16, next_power_of_2(op.heads // op.kv_heads)),
            "BLOCK_N": block,
            "programs": WAVES * (device.value("compute_units") or 64),
            "most_splits": MOST_SPLITS,
            "num_warps": 4,
            "num_stages": 3 if wide else 1,
            "PDL": overlaps(device),
        }


@kernel("triton.attention_prefill", code=f"{CODE}:prefill")
class TritonAttentionPrefill(PagedAttention, Kernel[AttentionPrefill]):
    """Tiles of tokens and the query heads of a KV head, keys in blocks with a running softmax.

    Which tile is whose is planned once a step.
    """

    def settings(self, op: AttentionPrefill, device: Device) -> Mapping[str, Any]:
        wide, narrow = roomy(op, device), dtype(op.dtype).bits <= 16
        group = next_power_of_2(op.heads // op.kv_heads)
        tile = {
            "rows": 128 if wide else 64 if narrow else 32,
            "BLOCK_N": 64 if wide else 32 if narrow else 16,
            "num_warps": 8 if wide else 4,
            "num_stages": 2 if wide else 1,
        } | (dict(archs.of("attention_prefill", device)) if narrow else {})
        rows = tile.pop("rows")
        return {"GROUP_BLOCK": group, "BLOCK_T": max(16 // group, rows // group, 1), **tile, "PDL": overlaps(device)}
