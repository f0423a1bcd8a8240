"""What every kernel here needs, and the launch settings that follow from the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.device import Device
from hal.requirement import Requirement, library, vendor

TRITON: tuple[Requirement, ...] = (vendor("cuda", "rocm"), library("triton", ">=3.5,<4"), library("torch", ">=2.9"))


def next_power_of_2(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def overlaps(device: Device) -> bool:
    """Whether a launch may begin while the one before it still runs: ``PDL`` among launch settings."""
    return device.value("pdl") is True


def launched(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Launch settings as a kernel that takes PDL is called with."""
    return {**settings, "launch_pdl": True} if settings["PDL"] else dict(settings)
