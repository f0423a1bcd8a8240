"""What every kernel in CUDA C++ here needs, and refuses."""

from __future__ import annotations

from typing import Any

from hal.requirement import Reason, Requirement, arch, library, vendor


def cpp(*archs: str) -> tuple[Requirement, ...]:
    """Code that NVRTC compiles for these architectures."""
    return (vendor("cuda"), arch(*archs), library("torch", ">=2.9"), library("cuda_bindings", ">=12.8"))


def no_bfloat16(op: Any) -> Reason | None:
    """Why the code, which is of bfloat16, is not for this op, or nothing."""
    return None if op.dtype == "bfloat16" else Reason("op", f"needs bfloat16; dtype is {op.dtype}")
