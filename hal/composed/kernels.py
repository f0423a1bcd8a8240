"""Composed kernels: each names its parts, which are resolved on their own under the same policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import Format, Made, Quantized, Tensor
from hal.kernel import Kernel, Part, Tier, kernel
from hal.numerics import EXACT, Numerics
from hal.opening import gemm_part, norm_part, opened
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
    Head,
    InProj,
    NormGateUp,
    NormLinear,
    Quantize,
    RMSNorm,
    SiluMul,
)
from hal.ops.linear import PartGroup, part_groups
from hal.requirement import Reason

CODE = "hal.composed.code"


def outs(op: Any) -> tuple[Format, ...]:
    """The formats that an op gives its value in."""
    out: Made = op.out
    return out if isinstance(out, tuple) else (out,)


class Composed(Kernel[Any]):
    """Base: the numbers are those of the parts."""

    tier: ClassVar[Tier] = "composed"
    launches = 0
    quantized = True

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

    def makes(self, op: Any) -> tuple[Made, ...]:
        return (op.out,) if any(isinstance(form, Quantized) for form in outs(op)) else ()

    def parts(self, op: Any) -> Mapping[str, Part]:
        narrow = {i: form for i, form in enumerate(outs(op)) if isinstance(form, Quantized)}
        if not narrow:
            return {}
        columns = next(op.signature().tensors("results")).shape[-1]
        found = {"make": Part(replace(op, out=Tensor(op.dtype)))}
        for i, form in narrow.items():
            name, side = (f"quantize{i}", {"out": f"out{i}"}) if isinstance(op.out, tuple) else ("quantize", {})
            found[name] = Part(Quantize(columns=columns, dtype=op.dtype, out=form), side)
        return found


@kernel("composed.reduce_norm", code=f"{CODE}:reduce_norm")
class ReduceNorm(Composed, Kernel[AddRMSNorm]):
    """AllReduce, then add and norm."""

    def refuses(self, op: AddRMSNorm, device: Device) -> Reason | None:
        return Reason("rank", "needs more than one rank to reduce over; world is 1") if op.world == 1 else None

    def makes(self, op: AddRMSNorm) -> tuple[Made, ...]:
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


@kernel("composed.in_proj", code=f"{CODE}:in_proj")
class ComposedInProj(Composed, Kernel[InProj]):
    """AddRMSNorm in every format that is wanted, then a Gemm for the parts of each scheme."""

    def refuses(self, op: InProj, device: Device) -> Reason | None:
        groups = part_groups(op.parts)
        if not op.schemes():
            return Reason("op", f"needs a part that is quantized; all are in {op.dtype}")
        for output in op.outputs():
            within = [str(group) for group in groups if any(p.output == output for p in group.parts)]
            if len(within) > 1:
                return Reason("op", f"needs the parts of output {output} quantized alike; they are {'; '.join(within)}")
        return per_tensor(groups)

    def parts(self, op: InProj) -> Mapping[str, Part]:
        return grouped(op)


def grouped(op: InProj | NormLinear) -> dict[str, Part]:
    """The norm in every format that is wanted, and a product for each group of parts."""
    gemms = {
        f"gemm{g.suffix}": gemm_part(op, g.rows, op.hidden, g.scheme, f"weight{g.suffix}")
        for g in part_groups(op.parts)
    }
    return {"norm": norm_part(op, *gemms), **gemms}


def per_tensor(groups: Sequence[PartGroup]) -> Reason | None:
    """Why one product cannot read the scales of a group's parts, or nothing."""
    for group in groups:
        if group.scheme and group.scheme.weight.scale.for_all and len(group.parts) > 1:
            return Reason("op", f"needs scales by rows to read several parts as one; of {group} each has one scale")
    return None


@kernel("composed.norm_linear", code=f"{CODE}:norm_linear")
class ComposedNormLinear(Composed, Kernel[NormLinear]):
    """AddRMSNorm, Gemm."""

    def refuses(self, op: NormLinear, device: Device) -> Reason | None:
        if len(groups := part_groups(op.parts)) > 1:
            return Reason("op", f"needs all parts quantized alike; they are {'; '.join(map(str, groups))}")
        return per_tensor(groups)

    def parts(self, op: NormLinear) -> Mapping[str, Part]:
        return opened(op, op.width, op.parts[0].scheme, "weight")


@kernel("composed.norm_linears", code=f"{CODE}:norm_linears")
class ComposedNormLinears(Composed, Kernel[NormLinear]):
    """AddRMSNorm in every format that is wanted, a Gemm for the parts of each scheme, their columns side by side."""

    launches = 1

    def refuses(self, op: NormLinear, device: Device) -> Reason | None:
        if len(groups := part_groups(op.parts)) == 1:
            return Reason("op", f"needs parts quantized in several ways; they are {groups[0]}")
        return per_tensor(groups)

    def parts(self, op: NormLinear) -> Mapping[str, Part]:
        return grouped(op)


@kernel("composed.norm_gate_up", code=f"{CODE}:norm_gate_up")
class ComposedNormGateUp(Composed, Kernel[NormGateUp]):
    """AddRMSNorm, Gemm, SiluMul."""

    def refuses(self, op: NormGateUp, device: Device) -> Reason | None:
        if op.gate_up and op.gate_up.weight.scale.for_all:
            return Reason("op", "needs scales by rows to read gate and up as one; each has one scale")
        return None

    def makes(self, op: NormGateUp) -> tuple[Format, ...]:
        return (op.out,)

    def parts(self, op: NormGateUp) -> Mapping[str, Part]:
        return {
            **opened(op, 2 * op.intermediate, op.gate_up, "gate_up"),
            "act": Part(SiluMul(columns=op.intermediate, dtype=op.dtype, out=op.out)),
        }


@kernel("composed.gated_mlp", code=f"{CODE}:gated_mlp")
class ComposedGatedMLP(Composed, Kernel[GatedMLP]):
    """NormGateUp, Gemm."""

    def parts(self, op: GatedMLP) -> Mapping[str, Part]:
        sizes = {name: getattr(op, name) for name in ("hidden", "intermediate", "dtype", "eps", "world", "gate_up")}
        return {
            "gate_up": Part(NormGateUp(**sizes, out=Tensor(op.dtype)), feeds=("down",)),
            "down": gemm_part(op, op.hidden, op.intermediate, op.down, "down"),
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
            "gemm": gemm_part(op, op.hidden, op.columns, None, "weight"),
        }
        if op.world > 1:
            found["reduce"] = Part(AllReduce(columns=op.hidden, dtype=op.dtype, world=op.world))
        return found


@kernel("composed.head", code=f"{CODE}:head")
class ComposedHead(Composed, Kernel[Head]):
    """AddRMSNorm, Gemm, and AllGather where there are several ranks."""

    def parts(self, op: Head) -> Mapping[str, Part]:
        found = opened(op, op.vocab, op.scheme, "weight")
        if op.scheme:  # the rows after the norm are a result too
            found["norm"] = norm_part(op, "gemm", Tensor(op.dtype))
        if op.world > 1:
            found["gather"] = Part(AllGather(columns=op.vocab, dtype=op.dtype, world=op.world))
        return found
