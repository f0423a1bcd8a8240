"""What CUDA's tools say of the device, asked without starting CUDA and without importing torch here.

Cheap tests come first: files of the driver, CUDA_VISIBLE_DEVICES, the text of torch's version.py.
Then a child process asks cuda.core where it is installed, else torch: both start the driver, after
which a process can no longer fork or hide devices. Torch answers here only if it has started CUDA.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from hal.device import Fact
from hal.probing import ask_child, attempt, built_with, fact, library, tell

FEATURES = ("fp8_e4m3fn", "fp4_e2m1", "mma", "tma", "pdl")
# exact: an architecture that is not listed answers nothing. PTX ISA; CUDA C++ Programming Guide
ARCHS: dict[str, tuple[bool, ...]] = {
    "sm_70": (False, False, True, False, False),
    "sm_75": (False, False, True, False, False),
    "sm_80": (False, False, True, False, False),
    "sm_86": (False, False, True, False, False),
    "sm_87": (False, False, True, False, False),
    "sm_89": (True, False, True, False, False),
    "sm_90": (True, False, True, True, True),
    "sm_100": (True, True, True, True, True),
    "sm_103": (True, True, True, True, True),
    "sm_110": (True, True, True, True, True),
    "sm_120": (True, True, True, True, True),
    "sm_121": (True, True, True, True, True),
}
GEMM_ROW_BYTES = 16  # cuBLAS documentation, Tensor Core Usage


def probe(root: Path = Path("/")) -> dict[str, Fact]:
    """Facts about the CUDA device that is here; ``vendor`` without a value says why none is."""
    absent = _absent(root)
    return _libraries() | ({"vendor": absent} if absent else {"driver": _driver(root)} | _ask())


def _absent(root: Path) -> Fact | None:
    """Why there can be no CUDA device, by tests that start nothing."""
    if not _driver_is_here(root):
        return Fact(None, "probed", "no driver (libcuda.so.1 is not found)")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return Fact(None, "probed", "no device (CUDA_VISIBLE_DEVICES is empty)")
    hip = built_with("hip")
    if hip.value is not None:
        # its torch.cuda answers for AMD's devices, with capabilities that look like Hopper's
        return Fact(None, "probed", f"torch is built for ROCm (HIP {hip.value})")
    cuda = built_with("cuda")
    if cuda.value is None and cuda.why != "torch is not installed":
        return Fact(None, cuda.source, cuda.why)
    return None


def _driver_is_here(root: Path) -> bool:
    files = ("dev/nvidiactl", "dev/dxg", "proc/driver/nvidia/version")
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    cache, _ = attempt(lambda: b"libcuda.so.1" in (root / "etc/ld.so.cache").read_bytes())
    seen, _ = attempt(lambda: any((folder / "libcuda.so.1").exists() for folder in folders))
    return bool(cache or seen or any((root / file).exists() for file in files))


def _ask() -> dict[str, Fact]:
    """Ask a child process, or torch if it has started CUDA here."""
    torch = sys.modules.get("torch")
    started, _ = attempt(lambda: torch is not None and torch.cuda.is_initialized())
    facts, error = attempt(lambda: from_torch(torch) if started else ask_child("hal_cuda.probe"))
    if facts is None:
        return {"vendor": Fact(None, "failed", f"{'torch' if started else 'in a child process'}: {error}")}
    return facts


def ask_here() -> dict[str, Fact]:
    """cuda.core's answer, else torch's. Starts CUDA's driver in the process that calls it."""
    facts, error = attempt(from_core)
    if facts is not None:
        return facts
    core = f"cuda.core: {error}"
    if "NO_DEVICE" in core:
        return {"vendor": Fact(None, "probed", f"no device ({core})")}
    torch, error = attempt(lambda: import_module("torch"))
    if torch is None:
        return {"vendor": Fact(None, "failed", f"nothing to ask: {core}; torch: {error}")}
    return from_torch(torch)


def from_core() -> dict[str, Fact]:
    """Device 0 by cuda.core 1.x. Starts the driver, makes no context."""
    from cuda.core import Device

    device = Device(0)
    major, minor = device.compute_capability
    ask = device.properties
    by = "cuda.core"
    return _facts(major, minor, by) | {
        "name": fact(lambda: str(device.name), by),
        "uuid": fact(lambda: _uuid(device.uuid), by),
        "compute_units": fact(lambda: ask.multiprocessor_count, by),
        "l2_bytes": fact(lambda: ask.l2_cache_size, by),
        "shared_bytes": fact(lambda: ask.max_shared_memory_per_block_optin, by),
        "wave_size": fact(lambda: ask.warp_size, by),
        "memory_bytes": fact(lambda: device.to_system_device().memory_info.total, f"{by}, NVML"),
        "bandwidth": _bandwidth(lambda: (ask.memory_clock_rate, ask.global_memory_bus_width)),
    }


def from_torch(torch: Any) -> dict[str, Fact]:
    """torch's current device. Starts CUDA in the process that calls it."""
    if torch.version.hip is not None:
        return {"vendor": Fact(None, "probed", f"torch is built for ROCm (HIP {torch.version.hip})")}
    if torch.cuda.device_count() == 0:
        return {"vendor": Fact(None, "probed", "no device (torch counts none)")}
    ask = torch.cuda.get_device_properties(torch.cuda.current_device())
    by = "torch"
    return _facts(ask.major, ask.minor, by) | {
        "name": fact(lambda: ask.name, by),
        "uuid": fact(lambda: _uuid(ask.uuid), by),
        "compute_units": fact(lambda: ask.multi_processor_count, by),
        "l2_bytes": fact(lambda: ask.L2_cache_size, by),
        "shared_bytes": fact(lambda: ask.shared_memory_per_block_optin, by),
        "wave_size": fact(lambda: ask.warp_size, by),
        "memory_bytes": fact(lambda: ask.total_memory, by),
        "bandwidth": _bandwidth(lambda: (ask.memory_clock_rate, ask.memory_bus_width)),
    }


def _facts(major: int, minor: int, by: str) -> dict[str, Fact]:
    """What follows from the compute capability."""
    arch = f"sm_{major}{minor}"
    known = ARCHS.get(arch)
    features = {
        name: Fact(None, "probed", f"{arch} is not in the table of architectures")
        if known is None
        else Fact(known[i], "probed", f"table of architectures, {arch}")
        for i, name in enumerate(FEATURES)
    }
    return features | {
        "vendor": Fact("cuda", "probed", by),
        "arch": Fact(arch, "probed", f"{by}: compute capability {major}.{minor}"),
        "fp8_e4m3fnuz": Fact(False, "probed", "no CUDA architecture has it"),
        "gemm_row_bytes": Fact(GEMM_ROW_BYTES, "probed", "cuBLAS documentation, Tensor Core Usage"),
    }


def _bandwidth(read: Callable[[], tuple[int, int]]) -> Fact:
    """Bytes per second from the memory clock (kHz, two transfers a cycle) and the bus width (bits)."""
    answer, error = attempt(read)
    if answer is None:
        return Fact(None, "failed", error)
    khz, bits = answer
    if not khz or not bits:
        return Fact(None, "probed", f"the driver reports a memory clock of {khz} kHz and a bus of {bits} bits")
    why = f"derived: 2 transfers x {khz} kHz x {bits} bits, as the driver reports them"
    return Fact(2.0 * khz * 1000 * bits / 8, "probed", why)


def _uuid(answer: object) -> str:
    return str(answer).removeprefix("GPU-")


def _libraries() -> dict[str, Fact]:
    return {
        "cuda": built_with("cuda"),
        "flashinfer": library("flashinfer-python", module="flashinfer"),
        "flashinfer_jit_cache": library("flashinfer-jit-cache", module="flashinfer_jit_cache"),
        "cutlass_dsl": library("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"),
        "nvcc": _nvcc(),
        "cuda_core": library("cuda-core"),
        "cuda_bindings": library("cuda-bindings"),
    }


def _nvcc() -> Fact:
    """The compiler that builds of CUDA code would take: of CUDA_HOME or CUDA_PATH, of PATH, of the usual folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = str(Path(home) / "bin/nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(found).exists():
        return Fact(None, "probed", f"{found} is not there" if home else f"it is not in PATH, and {found} is not there")
    words = [found, "--version"]
    told, error = attempt(lambda: subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout)
    release = re.search(r"release (\d+\.\d+)", told or "")
    if release is None:
        return Fact(None, "failed", f"{found} --version: {error or 'names no release'}")
    return Fact(release[1], "probed", found)


def _driver(root: Path) -> Fact:
    """Version of the kernel-mode driver, from the files that it writes."""
    for file in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        text, _ = attempt((root / file).read_text)
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text or "")
        if found:
            return Fact(found[0], "probed", f"/{file}")
    return Fact(None, "probed", "no NVIDIA driver states its version")


if __name__ == "__main__":
    tell(ask_here())
