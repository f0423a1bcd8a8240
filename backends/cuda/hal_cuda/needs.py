"""What kernels in CUDA C++ here need and refuse, and what FlashInfer's do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hal.device import Device
from hal.requirement import Kind, Reason, Requirement, arch, library, vendor

# for each architecture the first CUDA whose compiler FlashInfer asks for it
TOOLKITS: Mapping[str, str] = {
    "sm_80": "12.3",
    "sm_86": "12.3",
    "sm_89": "12.3",
    "sm_90": "12.3",
    "sm_100": "12.8",
    "sm_103": "12.9",
    "sm_120": "12.9",
    "sm_121": "12.9",
}
HOPPER_IN_DSL = "0.6.18"  # from here FlashInfer's delta rule of sm_90 is in CuTe DSL too
HALVES = ("bfloat16", "float16")


def cpp(*archs: str) -> tuple[Requirement, ...]:
    """Code that NVRTC compiles for these architectures."""
    return (vendor("cuda"), arch(*archs), library("torch", ">=2.9"), library("cuda_bindings", ">=12.8"))


def no_bfloat16(op: Any) -> Reason | None:
    """Why the code, which is of bfloat16, is not for this op, or nothing."""
    return None if op.dtype == "bfloat16" else Reason("op", f"needs bfloat16; dtype is {op.dtype}")


def no_half(op: Any) -> Reason | None:
    """Why FlashInfer's code, which is of 16-bit floats, is not for this op, or nothing."""
    return None if op.dtype in HALVES else Reason("op", f"needs {' or '.join(HALVES)}; dtype is {op.dtype}")


def flashinfer(*archs: str) -> tuple[Requirement, ...]:
    """FlashInfer of the versions whose sources were read, on these architectures or all that it serves."""
    return (
        vendor("cuda"),
        arch(*(archs or TOOLKITS)),
        library("torch", ">=2.9"),
        library("flashinfer", ">=0.6.13,<0.8"),
        Toolkit(),
    )


def older(device: Device, version: str) -> bool:
    """Whether FlashInfer is there and of a version before this one."""
    return library("flashinfer", f"<{version}")(device) is None


def no_dsl(device: Device) -> Reason | None:
    """Why CuTe DSL cannot compile for this FlashInfer, or nothing; the versions are those its metadata asks."""
    return library("cutlass_dsl", ">=4.5" if older(device, "0.7") else ">=4.8")(device)


@dataclass(frozen=True)
class Toolkit:
    """torch is built with a CUDA that knows the architecture: FlashInfer asks torch, not the compiler."""

    kind: Kind = "software"

    def __call__(self, device: Device) -> Reason | None:
        least = TOOLKITS.get(str(device.value("arch")))
        return library("cuda", f">={least}")(device) if least else None


@dataclass(frozen=True)
class Compiled:
    """Code of FlashInfer's CUDA sources for the device: compiled ahead, or by nvcc at the first call."""

    kind: Kind = "software"

    def __call__(self, device: Device) -> Reason | None:
        least = TOOLKITS.get(str(device.value("arch")), "")
        reason = library("nvcc", least and f">={least}")(device)
        ahead, version = device.value("flashinfer_jit_cache"), device.value("flashinfer")
        # its version has the CUDA version behind: 0.7.4+cu130
        if reason is None or (ahead and version and str(ahead).partition("+")[0] == version):
            return None
        wanted = f"or flashinfer_jit_cache {version}; {device.label} has {ahead or 'none'}"
        return Reason("software", f"{reason}, {wanted}")


@dataclass(frozen=True)
class CompiledOrDsl:
    """The same, or CuTe DSL, which FlashInfer's norms take where it is installed."""

    kind: Kind = "software"

    def __call__(self, device: Device) -> Reason | None:
        return Compiled()(device) if no_dsl(device) else None


@dataclass(frozen=True)
class DeltaRule:
    """What the chunked delta rule is written in: CUDA C++ for Hopper before 0.6.18, else CuTe DSL."""

    kind: Kind = "software"

    def __call__(self, device: Device) -> Reason | None:
        hopper = device.value("arch") == "sm_90"
        if hopper and older(device, HOPPER_IN_DSL):
            return Compiled()(device)
        return no_dsl(device) or (None if hopper else library("cuda", ">=13")(device))
