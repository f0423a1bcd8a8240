"""What kernels of ops that open a layer declare alike: the norm as a part, and products by scheme."""

from __future__ import annotations

from typing import Any

from hal.formats import Format, Scheme, Tensor
from hal.kernel import Part
from hal.ops import AddRMSNorm, Gemm
from hal.ops.linear import input_scale


def norm_part(op: Any, *feeds: str | Format) -> Part:
    """Reduction, residual add and norm of an op with ``hidden`` and ``eps``, in its dtype or as ``feeds`` take it."""
    norm = AddRMSNorm(hidden=op.hidden, eps=op.eps, dtype=op.dtype, out=Tensor(op.dtype), world=op.world)
    return Part(norm, feeds=feeds)


def gemm_part(op: Any, rows: int, columns: int, scheme: Scheme | None, memory: str) -> Part:
    """A product in the op's dtype; ``memory`` holds its weight, others beside it the scales."""
    form = Tensor(op.dtype)
    gemm = Gemm(columns=columns, rows=rows, x=form, scheme=scheme, dtype=op.dtype)
    names = {"weight": memory, "input_scale": input_scale(memory)}
    names |= {f"weight_{scale}": f"{memory}_{scale}" for scale in ("scale", "global")}
    return Part(gemm, names)


def opened(op: Any, rows: int, scheme: Scheme | None, memory: str) -> dict[str, Part]:
    """The norm and one product of it: where that is quantized, it says what it takes, and the norm makes it."""
    gemm = gemm_part(op, rows, op.hidden, scheme, memory)
    return {"norm": norm_part(op, *(("gemm",) if scheme else ())), "gemm": gemm}
