"""What ROCm's tools say of the device, asked without starting HIP and without importing torch here.

The architecture is torch's ``gcnArchName``, never an environment variable or a library's guess;
aiter is known by its metadata alone, because importing it compiles, or fails in many ways.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from hal.device import Fact
from hal.errors import HalError
from hal.probing import ask_child, attempt, built_with, fact, library, tell

FEATURES = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1", "mma")
# exact: an architecture that is not listed answers nothing. ROCm documentation, data types and
# precision support; the last column is MFMA (gfx9) or WMMA
ARCHS: dict[str, tuple[bool, ...]] = {
    "gfx908": (False, False, False, True),
    "gfx90a": (False, False, False, True),
    "gfx942": (False, True, False, True),
    "gfx950": (True, False, True, True),
    "gfx1030": (False, False, False, False),
    "gfx1100": (False, False, False, True),
    "gfx1101": (False, False, False, True),
    "gfx1102": (False, False, False, True),
    "gfx1150": (False, False, False, True),
    "gfx1151": (False, False, False, True),
    "gfx1200": (True, False, False, True),
    "gfx1201": (True, False, False, True),
}
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class Arch(NamedTuple):
    """An LLVM target of AMD: gfx90a is 9, 0, a; gfx1201 is 12, 0, 1."""

    name: str
    major: int
    minor: int
    stepping: str


def parse_arch(text: str) -> Arch:
    """The target in ``gfx942:sramecc+:xnack-``. Errors: HalError for anything that is no full target."""
    found = re.fullmatch(r"gfx(\d{1,2})(\d)([0-9a-f])", text.partition(":")[0])
    if not found:
        shape = "gfx, major, one digit of minor, one of stepping, as in gfx942 or gfx90a:xnack-"
        raise HalError(f"{text!r} is no AMD architecture; expected {shape}")
    return Arch(found[0], int(found[1]), int(found[2]), found[3])


def probe(root: Path = Path("/")) -> dict[str, Fact]:
    """Facts about the ROCm device that is here; ``vendor`` without a value says why none is."""
    facts = {
        "rocm": built_with("hip"),
        "aiter": library("amd-aiter", "aiter", module="aiter"),
    }
    absent = _absent(root, facts["rocm"])
    return facts | ({"vendor": absent} if absent else {"driver": _driver(root)} | _ask())


def _absent(root: Path, hip: Fact) -> Fact | None:
    """Why there can be no ROCm device, by tests that start nothing."""
    if not any((root / file).exists() for file in ("dev/kfd", "dev/dxg")):
        return Fact(None, "probed", "no driver (/dev/kfd is not there)")
    for name in VISIBLE:
        if os.environ.get(name) == "":
            return Fact(None, "probed", f"no device ({name} is empty)")
        if name == "HIP_VISIBLE_DEVICES" and name in os.environ:
            break  # HIP reads CUDA_VISIBLE_DEVICES only without it
    return Fact(None, hip.source, hip.why) if hip.value is None else None


def _ask() -> dict[str, Fact]:
    """Ask torch in a child process, or here if it has started HIP here."""
    torch = sys.modules.get("torch")
    started, _ = attempt(lambda: torch is not None and torch.cuda.is_initialized())
    facts, error = attempt(lambda: from_torch(torch) if started else ask_child("hal_rocm.probe"))
    if facts is None:
        by = "torch" if started else "torch in a child process"
        return {"vendor": Fact(None, "failed", f"{by}: {error}")}
    return facts


def from_torch(torch: Any) -> dict[str, Fact]:
    """torch's current device. Starts HIP in the process that calls it."""
    if torch.version.hip is None:
        return {"vendor": Fact(None, "probed", "torch is built without hip")}
    if torch.cuda.device_count() == 0:
        return {"vendor": Fact(None, "probed", "no device (torch counts none)")}
    ask = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = parse_arch(ask.gcnArchName).name
    by = "torch"
    return _features(arch) | {
        "vendor": Fact("rocm", "probed", by),
        "arch": Fact(arch, "probed", f"{by}: gcnArchName {ask.gcnArchName}"),
        "name": fact(lambda: ask.name, by),
        "uuid": fact(lambda: str(ask.uuid), by),
        "compute_units": fact(lambda: ask.multi_processor_count, by),
        "memory_bytes": fact(lambda: ask.total_memory, by),
        "bandwidth": Fact(None, "probed", "what HIP reports as memory clock gives no bandwidth"),
        "l2_bytes": Fact(None, "probed", "torch tells the L2, not the Infinity Cache behind it"),
        "shared_bytes": fact(lambda: ask.shared_memory_per_block, by),
        "wave_size": fact(lambda: ask.warp_size, by),
        "gemm_row_bytes": Fact(None, "probed", "no document known of the row sizes that hipBLASLt wants"),
    }


def _features(arch: str) -> dict[str, Fact]:
    known = ARCHS.get(arch)
    if known is None:
        unknown = Fact(None, "probed", f"{arch} is not in the table of architectures")
        return dict.fromkeys((*FEATURES, "tma", "pdl"), unknown)
    no = Fact(False, "probed", f"{arch} has none, by AMD's documents")
    values = zip(FEATURES, known, strict=True)
    facts = {name: Fact(value, "probed", f"table of architectures, {arch}") for name, value in values}
    return facts | {"tma": no, "pdl": no}


def _driver(root: Path) -> Fact:
    """Version of the kernel-mode driver; the one inside the kernel states none."""
    file = "sys/module/amdgpu/version"
    text, _ = attempt((root / file).read_text)
    if text and text.strip():
        return Fact(text.strip(), "probed", f"/{file}")
    return Fact(None, "probed", "no amdgpu driver states its version")


if __name__ == "__main__":
    import torch as _torch

    tell(from_torch(_torch))
