"""Composed kernels: each names its parts, which are resolved on their own under the same policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import Format, Quantized, Tensor
from hal.kernel import Kernel, Part, Tier, kernel
from hal.numerics import EXACT, Numerics
from hal.opening import norm_part, one_format
from hal.ops import (
    AddRMSNorm,
    AllGather,
    AllReduce,
    AttentionDecode,
    AttentionPrefill,
    AttentionVerify,
    CausalConv,
    DraftIn,
    GatedDeltaDecode,
    GatedDeltaPrefill,
    GatedDeltaUpdate,
    GatedMLP,
    GatedRMSNorm,
    Gemm,
    Head,
    NormGateUp,
    NormLinear,
    Quantize,
    RMSNorm,
    SiluMul,
)
from hal.requirement import Reason

CODE = "hal.composed.code"


class Composed(Kernel[Any]):
    """Base: the numbers are those of the parts."""

    tier: ClassVar[Tier] = "composed"
    launches = 0

    def numerics(self, op: Any) -> Numerics:
        return EXACT  # it adds nothing to its parts


MAKERS = (RMSNorm, AddRMSNorm, GatedRMSNorm, SiluMul, NormGateUp, GatedDeltaPrefill, GatedDeltaDecode)


@kernel(
    "composed.then_quantize",
    code=f"{CODE}:then_quantize",
    serves=(*MAKERS, AttentionPrefill, AttentionDecode, AttentionVerify),
)
class ThenQuantize(Composed):
    """The op in its own dtype, then Quantize: for edges whose format no kernel makes in one go."""

    def makes(self, op: Any) -> tuple[Format, ...]:
        return (op.out,) if isinstance(op.out, Quantized) else ()

    def parts(self, op: Any) -> Mapping[str, Part]:
        if not isinstance(op.out, Quantized):
            return {}
        columns = op.signature().results[0].shape[-1]
        return {
            "make": Part(replace(op, out=Tensor(op.dtype))),
            "quantize": Part(Quantize(columns=columns, dtype=op.dtype, out=op.out)),
        }


@kernel("composed.reduce_norm", code=f"{CODE}:reduce_norm")
class ReduceNorm(Composed, Kernel[AddRMSNorm]):
    """AllReduce, then add and norm."""

    def refuses(self, op: AddRMSNorm, device: Device) -> Reason | None:
        return Reason("rank", "needs more than one rank to reduce over; world is 1") if op.world == 1 else None

    def makes(self, op: AddRMSNorm) -> tuple[Format, ...]:
        return (op.out,)

    def parts(self, op: AddRMSNorm) -> Mapping[str, Part]:
        return {
            "reduce": Part(AllReduce(columns=op.hidden, dtype=op.dtype, world=op.world)),
            "norm": Part(replace(op, world=1)),
        }


@kernel("composed.gated_delta", code=f"{CODE}:gated_delta", serves=(GatedDeltaPrefill, GatedDeltaDecode))
class GatedDelta(Composed):
    """Convolution, delta rule, gated norm over the same state; the gate of padding is masked."""

    launches = 1

    def makes(self, op: Any) -> tuple[Format, ...]:
        return (op.out,)

    def parts(self, op: Any) -> Mapping[str, Part]:
        sizes = {
            name: getattr(op, name)
            for name in (
                "key_heads", "value_heads", "key_head_dim", "value_head_dim", "conv_width", "dtype", "state_dtype"
            )
        } | {"decode": op.mode == "decode"}  # fmt: skip
        norm = GatedRMSNorm(
            value_heads=op.value_heads,
            value_head_dim=op.value_head_dim,
            eps=op.eps,
            dtype=op.dtype,
            out=op.out,
        )
        return {
            "conv": Part(CausalConv(**sizes)),
            "update": Part(GatedDeltaUpdate(**sizes)),
            "norm": Part(norm),
        }


def _gemm(op: Any, rows: int, columns: int, memory: str = "weight") -> Part:
    form = Tensor(op.dtype)
    return Part(Gemm(columns=columns, rows=rows, x=form, weight=form, dtype=op.dtype), {"weight": memory})


@kernel("composed.norm_linear", code=f"{CODE}:norm_linear")
class ComposedNormLinear(Composed, Kernel[NormLinear]):
    """AddRMSNorm, Gemm."""

    def refuses(self, op: NormLinear, device: Device) -> Reason | None:
        return one_format(op)

    def parts(self, op: NormLinear) -> Mapping[str, Part]:
        return {"norm": norm_part(op), "gemm": _gemm(op, op.width, op.hidden)}


@kernel("composed.norm_gate_up", code=f"{CODE}:norm_gate_up")
class ComposedNormGateUp(Composed, Kernel[NormGateUp]):
    """AddRMSNorm, Gemm, SiluMul."""

    def makes(self, op: NormGateUp) -> tuple[Format, ...]:
        return (op.out,)

    def parts(self, op: NormGateUp) -> Mapping[str, Part]:
        return {
            "norm": norm_part(op),
            "gemm": _gemm(op, 2 * op.intermediate, op.hidden, "gate_up"),
            "act": Part(SiluMul(columns=op.intermediate, dtype=op.dtype, out=op.out)),
        }


@kernel("composed.gated_mlp", code=f"{CODE}:gated_mlp")
class ComposedGatedMLP(Composed, Kernel[GatedMLP]):
    """NormGateUp, Gemm."""

    def parts(self, op: GatedMLP) -> Mapping[str, Part]:
        sizes = {name: getattr(op, name) for name in ("hidden", "intermediate", "dtype", "eps", "world")}
        return {
            "gate_up": Part(NormGateUp(**sizes, out=Tensor(op.dtype)), feeds="down"),
            "down": _gemm(op, op.hidden, op.intermediate, "down"),
        }


@kernel("composed.draft_in", code=f"{CODE}:draft_in")
class ComposedDraftIn(Composed, Kernel[DraftIn]):
    """AllReduce where there are several ranks, RMSNorm twice, rows side by side, Gemm of this rank's columns."""

    launches = 1

    def refuses(self, op: DraftIn, device: Device) -> Reason | None:
        if 2 * op.hidden % op.world:
            return Reason("rank", f"needs {2 * op.hidden} columns divided by the ranks; there are {op.world}")
        return None

    def parts(self, op: DraftIn) -> Mapping[str, Part]:
        norm = RMSNorm(hidden=op.hidden, eps=op.eps, dtype=op.dtype, out=Tensor(op.dtype))
        found: dict[str, Part] = {
            "token": Part(norm, {"norm": "token_norm"}),
            "hidden": Part(norm, {"norm": "hidden_norm"}),
            "gemm": _gemm(op, op.hidden, op.columns),
        }
        if op.world > 1:
            found["reduce"] = Part(AllReduce(columns=op.hidden, dtype=op.dtype, world=op.world))
        return found


@kernel("composed.head", code=f"{CODE}:head")
class ComposedHead(Composed, Kernel[Head]):
    """AddRMSNorm, Gemm, and AllGather where there are several ranks."""

    def parts(self, op: Head) -> Mapping[str, Part]:
        found: dict[str, Part] = {"norm": norm_part(op), "gemm": _gemm(op, op.vocab, op.hidden)}
        if op.world > 1:
            found["gather"] = Part(AllGather(columns=op.vocab, dtype=op.dtype, world=op.world))
        return found
