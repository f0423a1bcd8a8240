"""Declarations: norm and rotation of queries and keys, with the KV write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.kernel import Kernel, Rows, Tier, kernel
from hal.ops import QKNormRope
from hal.requirement import Reason
from hal_triton.needs import TRITON, next_power_of_2, overlaps
from hal_triton.small import too_wide

CODE = "hal_triton.code.rope:qk_norm_rope"
WIDEST_HEAD = 1024
FEW_ROWS = 64


class _Rope(Kernel[QKNormRope]):
    tier: ClassVar[Tier] = "portable"
    needs = TRITON
    tile: ClassVar[int]  # elements of heads that a program holds
    most_rows: ClassVar[int]
    num_warps: ClassVar[int]

    def refuses(self, op: QKNormRope, device: Device) -> Reason | None:
        if op.head_dim > WIDEST_HEAD:
            return Reason("op", f"needs head_dim of at most {WIDEST_HEAD}; it is {op.head_dim}")
        if op.rotary_dim % 2 or not 2 <= op.rotary_dim <= op.head_dim:
            return Reason("op", f"needs an even rotary_dim of 2 to head_dim {op.head_dim}; it is {op.rotary_dim}")
        return too_wide(op)

    def settings(self, op: QKNormRope, device: Device) -> Mapping[str, Any]:
        block = next_power_of_2(op.head_dim)
        group = min(max(1, self.tile // block), next_power_of_2(op.heads))
        rows = min(self.most_rows, max(1, self.tile // (block * group)))
        return {"ROWS": rows, "GROUP": group, "num_warps": self.num_warps, "PDL": overlaps(device)}


@kernel("triton.qk_norm_rope", code=CODE)
class TritonQKNormRope(_Rope, Kernel[QKNormRope]):
    """A program a head of a row, for few rows; q dense, the gate a view of qkv."""

    tile, most_rows, num_warps = 256, 1, 1

    def rows(self, op: QKNormRope, device: Device) -> Rows:
        return (1, FEW_ROWS)


@kernel("triton.qk_norm_rope_tiled", code=CODE)
class TritonQKNormRopeTiled(_Rope, Kernel[QKNormRope]):
    """A program several heads of a row, or of some rows, which share the angles; q dense, the gate a view of qkv."""

    tile, most_rows, num_warps = 2048, 4, 4
