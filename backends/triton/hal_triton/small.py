"""Declarations: activation, encoder, gated norm, embedding, the largest of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import STATIC_FP8, Format, Quantized, Scale, Tensor, dtype
from hal.kernel import Kernel, Tier, kernel
from hal.numerics import EXACT, Numerics
from hal.ops import ArgMax, Embed, GatedRMSNorm, Quantize, SiluMul
from hal.requirement import Reason, feature
from hal_triton.needs import TRITON, next_power_of_2, overlaps

CODE = "hal_triton.code.small"
ENCODINGS = (STATIC_FP8, Quantized("float8_e4m3fnuz", Scale("tensor", static=True)))
WIDEST_HEAD = 8192  # a head is held in one program's registers


def too_wide(op: Any) -> Reason | None:
    """Everything here is computed in float32."""
    if dtype(op.dtype).bits > 32:
        return Reason("op", f"computes in float32; dtype is {op.dtype}")
    return None


def no_encoding(op: Any, device: Device) -> Reason | None:
    """Why the device cannot write the narrow elements of ``out``, or nothing."""
    if op.out not in ENCODINGS:
        return None
    return feature(op.out.value.replace("float8", "fp8"))(device)


class Encoding(Kernel[Any]):
    """A portable kernel that writes its dtype, or static fp8 of a kind that the device has."""

    tier: ClassVar[Tier] = "portable"
    needs = TRITON

    def refuses(self, op: Any, device: Device) -> Reason | None:
        return too_wide(op) or no_encoding(op, device)

    def makes(self, op: Any) -> tuple[Format, ...]:
        return (Tensor(op.dtype), *ENCODINGS)


class _ByColumns(Encoding):
    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        return {"BLOCK": min(1024, next_power_of_2(op.columns)), "num_warps": 4, "PDL": overlaps(device)}


@kernel("triton.silu_mul", code=f"{CODE}:silu_mul")
class TritonSiluMul(_ByColumns, Kernel[SiluMul]):
    """A program a piece of a row; writes its dtype or static fp8."""


@kernel("triton.quantize", code=f"{CODE}:quantize")
class TritonQuantize(_ByColumns, Kernel[Quantize]):
    """Static scales; the division and the rounding are torch's."""

    def makes(self, op: Quantize) -> tuple[Format, ...]:
        return ENCODINGS

    def numerics(self, op: Quantize) -> Numerics:
        return EXACT


@kernel("triton.gated_rms_norm", code=f"{CODE}:gated_rms_norm")
class TritonGatedRMSNorm(Encoding, Kernel[GatedRMSNorm]):
    """Several heads of a row a program: norm, then gate; writes its dtype or static fp8."""

    def refuses(self, op: GatedRMSNorm, device: Device) -> Reason | None:
        if op.value_head_dim > WIDEST_HEAD:
            return Reason("op", f"needs heads of at most {WIDEST_HEAD}; value_head_dim is {op.value_head_dim}")
        return super().refuses(op, device)

    def settings(self, op: GatedRMSNorm, device: Device) -> Mapping[str, Any]:
        block = next_power_of_2(op.value_head_dim)
        group = min(max(1, 1024 // block), next_power_of_2(op.value_heads))
        return {"BLOCK": block, "GROUP": group, "num_warps": 4, "PDL": overlaps(device)}


@kernel("triton.embed", code=f"{CODE}:embed")
class TritonEmbed(Kernel[Embed]):
    """Copies the rows and writes the zero residual beside them; ids of other ranks give zero."""

    tier: ClassVar[Tier] = "portable"
    needs = TRITON

    def numerics(self, op: Embed) -> Numerics:
        return EXACT

    def settings(self, op: Embed, device: Device) -> Mapping[str, Any]:
        return {"BLOCK": min(1024, next_power_of_2(op.hidden)), "num_warps": 4, "PDL": overlaps(device)}


@kernel("triton.argmax", code=f"{CODE}:argmax")
class TritonArgMax(Kernel[ArgMax]):
    """A program a piece of a row, then one a row: of equals the lower, NaN above all."""

    tier: ClassVar[Tier] = "portable"
    needs = TRITON
    launches = 2

    def refuses(self, op: ArgMax, device: Device) -> Reason | None:
        return too_wide(op)

    def numerics(self, op: ArgMax) -> Numerics:
        return EXACT

    def settings(self, op: ArgMax, device: Device) -> Mapping[str, Any]:
        return {"BLOCK": min(4096, next_power_of_2(op.vocab)), "num_warps": 4, "PDL": overlaps(device)}
