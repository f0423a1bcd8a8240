"""Declarations: Gated DeltaNet cores and their parts, attention and its prologue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import STATIC_FP8, Format, Tensor
from hal.kernel import Kernel, kernel
from hal.layout import KV, VK, Layout, Ring, Shift
from hal.ops import (
    AttentionDecode,
    AttentionPrefill,
    CausalConv,
    GatedDeltaDecode,
    GatedDeltaPrefill,
    GatedDeltaUpdate,
    QKNormRope,
)
from hal.requirement import library

CODE = "hal_torch.code"
TORCH = (library("torch", ">=2.9"),)
DELTA: Mapping[str, tuple[Layout, ...]] = {"delta": (VK(), KV())}


@kernel("torch.prefill", code=f"{CODE}.gated_delta:prefill")
class Prefill(Kernel[GatedDeltaPrefill]):
    """The chunked delta rule in float32, sequences side by side, padded to the longest."""

    needs = TORCH
    captures = False

    def reads(self, op: GatedDeltaPrefill, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {"conv": (Shift(), Ring(op.conv_width)), **DELTA}


@kernel("torch.decode", code=f"{CODE}.gated_delta:decode")
class Decode(Kernel[GatedDeltaDecode]):
    """One function for the whole core; writes bfloat16 or static fp8."""

    needs = TORCH
    captures = False
    layouts: ClassVar[Mapping[str, tuple[Layout, ...]]] = {"conv": (Shift(),), "delta": (VK(),)}

    def makes(self, op: GatedDeltaDecode) -> tuple[Format, ...]:
        return (Tensor(op.dtype), STATIC_FP8)


@kernel("torch.decode_ring", code=f"{CODE}.gated_delta:decode")
class DecodeRing(Kernel[GatedDeltaDecode]):
    """The same over a ring of convolution inputs, and over either order of the state."""

    needs = TORCH
    launches = 2
    captures = False

    def reads(self, op: GatedDeltaDecode, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {"conv": (Ring(op.conv_width),), **DELTA}


@kernel("torch.causal_conv", code=f"{CODE}.gated_delta:causal_conv")
class TorchCausalConv(Kernel[CausalConv]):
    """Whole sequences or single tokens."""

    needs = TORCH
    captures = False

    def reads(self, op: CausalConv, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        return {"conv": (Shift(), Ring(op.conv_width))}


@kernel("torch.delta_update", code=f"{CODE}.gated_delta:delta_update")
class TorchDeltaUpdate(Kernel[GatedDeltaUpdate]):
    """Chunked for sequences, one step for single tokens."""

    needs = TORCH
    captures = False
    layouts = DELTA


@kernel("torch.qk_norm_rope", code=f"{CODE}.attention:qk_norm_rope")
class TorchQKNormRope(Kernel[QKNormRope]):
    """Angles in float64, the rest in float32."""

    needs = TORCH
    captures = False


class _Attention(Kernel[Any]):
    needs = TORCH
    captures = False


@kernel("torch.attention_prefill", code=f"{CODE}.attention:prefill")
class Attention(_Attention, Kernel[AttentionPrefill]):
    """``scaled_dot_product_attention``, a sequence at a time."""


@kernel("torch.attention_decode", code=f"{CODE}.attention:decode")
class AttentionOne(_Attention, Kernel[AttentionDecode]):
    """All sequences at once over gathered cells; where the cells are is planned once a step."""
