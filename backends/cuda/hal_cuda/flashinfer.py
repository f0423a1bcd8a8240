"""Declarations: FlashInfer's kernels. What is left out, and why: docs/flashinfer.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal_triton.needs import overlaps

from hal.device import Device
from hal.formats import dtype
from hal.kernel import Kernel, Tier, kernel
from hal.layout import VK, Layout
from hal.numerics import Class, Numerics
from hal.ops import AddRMSNorm, AttentionPrefill, GatedDeltaUpdate, RMSNorm, SiluMul
from hal.requirement import Reason
from hal_cuda.needs import Compiled, CompiledOrDsl, DeltaRule, flashinfer, no_half

CODE = "hal_cuda.code.flashinfer"
LINE = 16  # bytes that a thread loads at once
HEAD_DIMS = (64, 128, 256)  # of attention
STATE_DIM = 128  # of the delta rule, keys and values


def ragged(op: Any, name: str) -> Reason | None:
    """Why rows of this field's width are not whole loads, or nothing."""
    size = getattr(op, name) * dtype(op.dtype).bits // 8
    return Reason("op", f"needs rows of a multiple of {LINE} bytes; {name} takes {size}") if size % LINE else None


class _Norm(Kernel[Any]):
    tier: ClassVar[Tier] = "composed"
    needs = (*flashinfer(), CompiledOrDsl())

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.world > 1:
            return Reason("rank", f"reduces over no ranks; world is {op.world}")
        if op.offset not in (0.0, 1.0):
            return Reason("op", f"needs offset 0 or 1; it is {op.offset}")
        return no_half(op) or ragged(op, "hidden")

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        return {"PDL": overlaps(device)}


@kernel("cuda.flashinfer_rms_norm", code=f"{CODE}:rms_norm")
class FlashInferRMSNorm(_Norm, Kernel[RMSNorm]):
    """``gemma_rmsnorm``, or ``rmsnorm`` where offset is 0; rows that are not aligned are copied first."""


@kernel("cuda.flashinfer_add_rms_norm", code=f"{CODE}:add_rms_norm")
class FlashInferAddRMSNorm(_Norm, Kernel[AddRMSNorm]):
    """torch's sum, then the norm of it.

    FlashInfer's fused one writes over both arguments and normalises the sum before it is rounded.
    """

    tier: ClassVar[Tier] = "composed"
    launches = 2


@kernel("cuda.flashinfer_silu_mul", code=f"{CODE}:silu_mul")
class FlashInferSiluMul(Kernel[SiluMul]):
    """``silu_and_mul``; rows that do not lie one after the other are copied first."""

    tier: ClassVar[Tier] = "composed"
    needs = (*flashinfer(), Compiled())

    def refuses(self, op: SiluMul, device: Device) -> Reason | None:
        return no_half(op) or ragged(op, "columns")

    def settings(self, op: SiluMul, device: Device) -> Mapping[str, Any]:
        return {"PDL": overlaps(device)}


@kernel("cuda.flashinfer_prefill", code=f"{CODE}:prefill")
class FlashInferPrefill(Kernel[AttentionPrefill]):
    """``BatchPrefillWithPagedKVCacheWrapper``, planned on the host once a step; then the gate by torch."""

    tier: ClassVar[Tier] = "composed"
    needs = (*flashinfer(), Compiled())
    launches = 4
    captures = False

    def refuses(self, op: AttentionPrefill, device: Device) -> Reason | None:
        if op.head_dim not in HEAD_DIMS:
            return Reason("op", f"needs head_dim {', '.join(map(str, HEAD_DIMS))}; it is {op.head_dim}")
        if op.heads % op.kv_heads:
            return Reason("op", f"needs heads to be a multiple of kv_heads; they are {op.heads} and {op.kv_heads}")
        return no_half(op)

    def numerics(self, op: AttentionPrefill) -> Numerics:
        # the weights of the softmax, what they give, the gate
        return Numerics(Class.REASSOCIATED, roundings=3)

    def settings(self, op: AttentionPrefill, device: Device) -> Mapping[str, Any]:
        return {"backend": "fa3" if device.value("arch") == "sm_90" else "fa2", "PDL": overlaps(device)}


@kernel("cuda.flashinfer_chunk", code=f"{CODE}:chunk")
class FlashInferChunk(Kernel[GatedDeltaUpdate]):
    """``chunk_gated_delta_rule`` over sequences of any lengths; norms, decay and beta by torch before it."""

    tier: ClassVar[Tier] = "library"
    needs = (*flashinfer("sm_90", "sm_100", "sm_103"), DeltaRule())
    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"delta": (VK(),)}
    launches = 30  # nearly all of them torch's

    def refuses(self, op: GatedDeltaUpdate, device: Device) -> Reason | None:
        if op.decode:
            return Reason("op", "needs whole sequences; decode is one token of each")
        if (op.key_head_dim, op.value_head_dim) != (STATE_DIM, STATE_DIM):
            dims = f"{op.key_head_dim} and {op.value_head_dim}"
            return Reason("op", f"needs head dims of {STATE_DIM}; key and value head dim are {dims}")
        if op.value_heads % op.key_heads:
            heads = f"{op.value_heads} and {op.key_heads}"
            return Reason("op", f"needs value_heads to be a multiple of key_heads; they are {heads}")
        return no_half(op)

    def numerics(self, op: GatedDeltaUpdate) -> Numerics:
        # products of 16-bit operands, the inverse of a chunk among them
        return Numerics(Class.REASSOCIATED, roundings=4)
