"""Cases for kernels of aiter, whose sizes the ops' own cases do not have, in the encoding that the device has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hal.device import Device
from hal.formats import Quantized
from hal.ops import OPS
from hal.ops.base import Case

SIZED: dict[tuple[str, str], dict[str, Any]] = {
    ("AttentionDecode", "rocm.attention_decode"): {"head_dim": 64},
    ("MoE", "rocm.moe"): {"hidden": 64, "intermediate": 32, "dtype": "bfloat16"},
    ("Linear", "rocm.packed_a8w8"): {"columns": 512},
    ("Linear", "rocm.plain_a8w8"): {"columns": 208},
    ("Gemm", "rocm.packed_a8w8"): {"columns": 512},
    ("Gemm", "rocm.plain_a8w8"): {"columns": 208},
    ("Quantize", "rocm.quantize"): {},
    ("Quantize", "rocm.quantize_token"): {},
}


def cases(op: str, kernel: str, device: Device) -> Sequence[Case]:
    """The op's cases at sizes that the kernel takes, e4m3 as fnuz where the device multiplies that alone."""
    fnuz = device.value("fp8_e4m3fnuz") and not device.value("fp8_e4m3fn")

    def sized(case: Case) -> Case:
        forms = {side: getattr(case.op, side) for side in ("x", "out") if hasattr(case.op, side)}
        changed = {
            side: replace(form, value="float8_e4m3fnuz")
            for side, form in forms.items()
            if fnuz and isinstance(form, Quantized) and form.value == "float8_e4m3fn"
        }
        return replace(case, op=replace(case.op, **SIZED[op, kernel], **changed))

    return [sized(case) for case in OPS[op].cases()]
