"""Declarations: fp8 times fp8 through aiter, a scale for each row of either side.

A group of parts is one product: its rows lie one after the other, then rows of zeros with scale 1
up to what the preshuffled product wants at any number of rows of x; results are views of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from hal.device import Device
from hal.formats import Format, Quantized, Scale
from hal.kernel import Kernel, Rows, Tier, kernel
from hal.layout import Layout
from hal.ops import Gemm, Linear, Quantize
from hal.requirement import Reason
from hal_rocm.layouts import Codes, RowScales
from hal_rocm.rules import AITER, PLAIN_COLUMNS, fp8_kind, no_plain, padding, rows_within_buffer

CODE = "hal_rocm.code.a8w8"
TOKEN = Scale("token")
KINDS = ("float8_e4m3fn", "float8_e4m3fnuz")


def other_kind(form: object, device: Device) -> Reason | None:
    """Why the device does not compute with the elements of a format, or nothing."""
    kind = fp8_kind(device)
    if kind is None:
        return Reason("device", f"needs fp8_e4m3fn or fp8_e4m3fnuz; {device.label} has neither")
    if isinstance(form, Quantized) and form.value != kind:
        return Reason("device", f"needs elements in {kind}, which {device.label} multiplies; they are {form.value}")
    return None


class _A8W8(Kernel[Any]):
    tier: ClassVar[Tier] = "library"
    needs = AITER
    quantized = True

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if op.scheme is None:
            return Reason("op", f"needs a weight in fp8; it is {op.weight}")
        if op.scheme.weight.scale.per != "channel" or op.scheme.weight.value not in KINDS:
            return Reason("op", f"needs a weight in fp8 with a scale for each row; it is {op.weight}")
        if op.scheme.activations is None or op.scheme.activations.scale != TOKEN:
            rounded = op.scheme.activations or "not rounded"
            return Reason("op", f"needs a scheme that rounds x with a scale for each row; it is {rounded}")
        if op.dtype not in ("bfloat16", "float16"):
            return Reason("op", f"needs bfloat16 or float16; dtype is {op.dtype}")
        return other_kind(op.x, device)

    def takes(self, op: Any) -> tuple[Format, ...]:
        form = op.scheme.activations if op.scheme else None
        return tuple(replace(form, value=kind) for kind in KINDS) if form and form.scale == TOKEN else ()

    def settings(self, op: Any, device: Device) -> Mapping[str, Any]:
        """``rows``: of the weight with its padding; ``most``: of x in one call, more are taken some at a time."""
        multiple = self.multiple(op) or 1
        rows = -(-op.rows // multiple) * multiple
        return {"rows": rows, "most": rows_within_buffer(op.columns, 2 * rows)}

    def multiple(self, op: Any) -> int | None:
        """Rows that the weight is padded to a multiple of."""
        return 1

    def reads(self, op: Any, device: Device) -> Mapping[str, tuple[Layout, ...]]:
        multiple, narrow = self.multiple(op) or 1, fp8_kind(device) == "float8_e4m3fnuz"
        return {
            "weight": (Codes(multiple, shuffle=multiple > 1, fnuz=narrow),),
            "weight_scale": (RowScales(multiple, doubled=narrow),),
        }


@kernel("rocm.packed_a8w8", code=f"{CODE}:packed", serves=(Gemm, Linear))
class PackedA8W8(_A8W8):
    """The preshuffled product; rows are padded so that there is one at every number of rows of x."""

    def multiple(self, op: Any) -> int | None:
        return padding(op.columns)

    def refuses(self, op: Any, device: Device) -> Reason | None:
        if self.multiple(op) is None:
            return Reason("op", f"needs K in multiples of 128 from 512 on, of 64 from 192 on; K is {op.columns}")
        return super().refuses(op, device)


@kernel("rocm.plain_a8w8", code=f"{CODE}:plain", serves=(Gemm, Linear))
class PlainA8W8(_A8W8):
    """The product that pads for itself: where the preshuffled one has no tile for K."""

    launches = 2  # after the preshuffled one where both serve

    def refuses(self, op: Any, device: Device) -> Reason | None:
        return no_plain(op.columns) or super().refuses(op, device)


@kernel("rocm.quantize_token", code=f"{CODE}:quantize_token")
class AiterQuantizeToken(Kernel[Quantize]):
    """aiter's per_token_quant_hip: the scale of a row of zeros is 1."""

    tier: ClassVar[Tier] = "library"
    needs = AITER

    def refuses(self, op: Quantize, device: Device) -> Reason | None:
        if op.dtype not in ("bfloat16", "float16"):
            return Reason("op", f"needs bfloat16 or float16; dtype is {op.dtype}")
        if left := op.columns % PLAIN_COLUMNS:
            return Reason("op", f"needs columns in multiples of {PLAIN_COLUMNS}; {op.columns} leaves {left}")
        return other_kind(op.out, device)

    def makes(self, op: Quantize) -> tuple[Format, ...]:
        return tuple(Quantized(kind, TOKEN) for kind in KINDS)

    def rows(self, op: Quantize, device: Device) -> Rows:
        return (1, rows_within_buffer(2 * op.columns))
