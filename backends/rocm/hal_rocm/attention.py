"""Declarations: aiter's decode attention over plain KV pages.

pa_decode_gluon, its other one at head_dim 256, wants keys in five axes, which nothing here writes; the
prefill of unified_attention fails at head_dim 256, so the portable kernel serves prefill.
"""

from __future__ import annotations

from typing import ClassVar

from hal.device import Device
from hal.kernel import Kernel, Tier, kernel
from hal.numerics import Class, Numerics
from hal.ops import AttentionDecode
from hal.requirement import Reason
from hal_rocm.rules import AITER

HEAD_DIMS = (64, 128, 256)
WIDEST_GROUP = 16  # query heads of a KV head that one tile holds


@kernel("rocm.attention_decode", code="hal_rocm.code.attention:decode")
class AiterAttentionDecode(Kernel[AttentionDecode]):
    """unified_attention, one row of each sequence; gate and padding in torch behind it."""

    tier: ClassVar[Tier] = "library"
    needs = AITER
    launches = 8

    def refuses(self, op: AttentionDecode, device: Device) -> Reason | None:
        if op.dtype not in ("bfloat16", "float16"):
            return Reason("op", f"needs bfloat16 or float16; dtype is {op.dtype}")
        if op.head_dim not in HEAD_DIMS:
            return Reason("op", f"needs head_dim {' or '.join(map(str, HEAD_DIMS))}; it is {op.head_dim}")
        group = op.heads // op.kv_heads
        if op.heads % op.kv_heads or group > WIDEST_GROUP:
            heads = f"{op.heads} and {op.kv_heads}"
            return Reason(
                "op", f"needs heads to be at most {WIDEST_GROUP} times kv_heads, and a multiple; they are {heads}"
            )
        return None

    def numerics(self, op: AttentionDecode) -> Numerics:
        # the weights of the softmax, and what is mixed before the gate
        return Numerics(Class.REASSOCIATED, roundings=2)
