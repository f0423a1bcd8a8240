"""The CPU, from what the operating system says. Imports no torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from hal.device import Fact
from hal.probing import attempt, fact

NOT_ON_A_CPU = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1", "mma", "tma", "pdl")


def probe(root: Path = Path("/")) -> dict[str, Fact]:
    """Facts about the CPU: the device that is always here."""
    nothing = Fact(None, "probed", "a CPU has none")
    return {
        "vendor": Fact("cpu", "probed"),
        "arch": fact(lambda: platform.machine() or None, "platform.machine"),
        "name": _name(root),
        "uuid": nothing,
        "compute_units": fact(_cores, "cores that this process may run on"),
        "memory_bytes": fact(_memory, "all memory of the machine, not this process's share"),
        "bandwidth": Fact(None, "probed", "the system does not say"),
        "l2_bytes": _last_cache(root),
        "shared_bytes": nothing,
        "wave_size": nothing,
        "gemm_row_bytes": Fact(1, "probed", "plain torch takes any row"),
        **{name: Fact(False, "probed", "a CPU: not asked for") for name in NOT_ON_A_CPU},
        "link": Fact("none", "probed", "one device"),
        "link_bandwidth": Fact(None, "probed", "no peers"),
    }


def _name(root: Path) -> Fact:
    text, error = attempt((root / "proc/cpuinfo").read_text)
    if text is None:
        return Fact(None, "failed", error)
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return Fact(value.strip(), "probed", "/proc/cpuinfo")
    return Fact(None, "probed", "/proc/cpuinfo states no model name")


def _cores() -> int | None:
    # absent outside Linux
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _last_cache(root: Path) -> Fact:
    """Bytes of the highest level that the first core lists, as ``level`` and ``size`` (``32768K``)."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    levels: dict[int, int] = {}
    for folder in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, _ = attempt((folder / "level").read_text)
        size, _ = attempt((folder / "size").read_text)
        number, unit = (size or "").strip()[:-1], (size or "").strip()[-1:]
        if level and level.strip().isdigit() and number.isdigit() and unit in units:
            levels[int(level)] = int(number) * units[unit]
    if not levels:
        return Fact(None, "probed", "/sys lists no caches")
    return Fact(levels[max(levels)], "probed", f"/sys: level {max(levels)}, shared by a group of cores")
