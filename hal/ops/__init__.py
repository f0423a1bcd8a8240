"""The logical ops by name. A closed list: a model calls these, a kernel serves one of them."""

from __future__ import annotations

from typing import Any

from hal.errors import UnknownName
from hal.ops.attention import AttentionDecode, AttentionPrefill, QKNormRope
from hal.ops.base import Op
from hal.ops.drafts import Accept, AttentionVerify, DraftIn, GatedDeltaVerify
from hal.ops.ends import ArgMax, Embed, Head, Sample
from hal.ops.feed_forward import GatedMLP, MoE, NormGateUp, SiluMul
from hal.ops.gated_delta import (
    CausalConv,
    GatedDeltaDecode,
    GatedDeltaPrefill,
    GatedDeltaUpdate,
)
from hal.ops.linear import Gemm, InProj, Linear, NormLinear, Projection
from hal.ops.move import AllGather, AllReduce, Copy, Quantize
from hal.ops.norm import AddRMSNorm, GatedRMSNorm, RMSNorm

COARSE: tuple[type[Op[..., Any]], ...] = (
    Embed, InProj, GatedDeltaPrefill, GatedDeltaDecode, GatedDeltaVerify, Linear, NormLinear,
    QKNormRope, AttentionPrefill, AttentionDecode, AttentionVerify, GatedMLP, MoE, Head, Sample, DraftIn,
    Accept,
)  # fmt: skip
FINE: tuple[type[Op[..., Any]], ...] = (
    AllReduce, AllGather, RMSNorm, AddRMSNorm, Quantize, ArgMax, Gemm, NormGateUp, SiluMul, CausalConv,
    GatedDeltaUpdate, GatedRMSNorm, Copy,
)  # fmt: skip
OPS: dict[str, type[Op[..., Any]]] = {op.title(): op for op in (*COARSE, *FINE)}


def op_class(name: str) -> type[Op[..., Any]]:
    """The op of a name; an unknown one is an error that names the nearest."""
    try:
        return OPS[name]
    except KeyError:
        raise UnknownName("op", name, OPS) from None


__all__ = [
    "Accept",
    "AddRMSNorm",
    "AllGather",
    "AllReduce",
    "ArgMax",
    "AttentionDecode",
    "AttentionPrefill",
    "AttentionVerify",
    "COARSE",
    "CausalConv",
    "Copy",
    "DraftIn",
    "Embed",
    "FINE",
    "GatedDeltaDecode",
    "GatedDeltaPrefill",
    "GatedDeltaUpdate",
    "GatedDeltaVerify",
    "GatedMLP",
    "GatedRMSNorm",
    "Gemm",
    "Head",
    "InProj",
    "Linear",
    "MoE",
    "NormGateUp",
    "NormLinear",
    "OPS",
    "Projection",
    "QKNormRope",
    "Quantize",
    "RMSNorm",
    "Sample",
    "SiluMul",
    "op_class",
]
