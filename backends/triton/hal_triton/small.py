"""Declarations: activation, encoder, gated norm, embedding, the largest of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import BLOCK_FP8, STATIC_FP8, TOKEN_FP8, Made, Quantized, Tensor, dtype
from hal.kernel import Kernel, Tier, kernel
from hal.numerics import EXACT, Numerics
from hal.ops import ArgMax, Embed, GatedRMSNorm, Quantize, SiluMul
from hal.requirement import Reason, feature
from hal_triton.needs import TRITON, next_power_of_2, overlaps

CODE = "hal_triton.code.small"
FNUZ = "float8_e4m3fnuz"
ENCODINGS = (STATIC_FP8, replace(STATIC_FP8, value=FNUZ))
ROWS = (TOKEN_FP8, replace(TOKEN_FP8, value=FNUZ))  # a scale for each row: a program holds all of it
BLOCKS = (BLOCK_FP8, replace(BLOCK_FP8, value=FNUZ))
WIDEST_HEAD = 8192  # a head is held in one program's registers
WIDEST_ROW = 32768


def too_wide(op: Any) -> Reason | None:
    """Everything here is computed in float32."""
    if dtype(op.dtype).bits > 32:
        return Reason("op", f"computes in float32; dtype is {op.dtype}")
    return None


def no_encoding(op: Any, device: Device) -> Reason | None:
    """Why the device cannot write the narrow elements of ``out``, or nothing."""
    for form in op.out if isinstance(op.out, tuple) else (op.out,):
        if isinstance(form, Quantized) and form in (*ENCODINGS, *ROWS, *BLOCKS):
            return feature(form.value.replace("float8", "fp8"))(device)
    return None


class Encoding(Kernel[Any]):
    """A portable kernel that writes its dtype, or static fp8 of a kind that the device has."""

    tier: ClassVar[Tier] = "portable"
    needs = TRITON

    def refuses(self, op: Any, device: Device) -> Reason | None:
        return too_wide(op) or no_encoding(op, device)

    def makes(self, op: Any) -> tuple[Made, ...]:
        return (Tensor(op.dtype), *ENCODINGS)


def whole_row(columns: int, device: Device) -> Mapping[str, Any]:
    """Launch settings where a program holds a row."""
    block = next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512)), "PDL": overlaps(device)}


class _ByColumns(Encoding):
    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.out in ROWS and op.columns > WIDEST_ROW:
            return Reason("op", f"needs rows of at most {WIDEST_ROW} to scale each; columns is {op.columns}")
        return super().refuses(op, device)

    def makes(self, op: Any) -> tuple[Made, ...]:
        return (*super().makes(op), *ROWS, *BLOCKS)

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        if op.out in ROWS:
            return whole_row(op.columns, device)
        least = BLOCK_FP8.scale.block[1] if op.out in BLOCKS and BLOCK_FP8.scale.block else 1
        block = min(1024, max(least, next_power_of_2(op.columns)))
        return {"BLOCK": block, "num_warps": 4, "PDL": overlaps(device)}


@kernel("triton.silu_mul", code=f"{CODE}:silu_mul")
class TritonSiluMul(_ByColumns, Kernel[SiluMul]):
    """A program a piece of a row, or all of it to scale it; writes its dtype or fp8."""


@kernel("triton.quantize", code=f"{CODE}:quantize")
class TritonQuantize(_ByColumns, Kernel[Quantize]):
    """Scales given, of each row, of 1x128; divisions and rounding are torch's."""

    def makes(self, op: Quantize) -> tuple[Made, ...]:
        return (*ENCODINGS, *ROWS, *BLOCKS)

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
