"""Where an architecture takes other launch settings than those that an H200 measured best.

Each entry stands here because of what the compiler made without it (``ci/compile_kernels.py``): spilled
vector registers, or one wave a SIMD. None of them is timed. An architecture that is not listed takes
what follows from its facts.
"""

from __future__ import annotations

from collections.abc import Mapping

from hal.device import Device

# gfx9 has 256 vector registers a thread and 256 for accumulation, gfx12 the first alone
CDNA: Mapping[str, Mapping[str, int]] = {
    "attention_prefill": {"rows": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1},
    "moe_down": {"BLOCK_N": 4},
}
TABLE: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "gfx942": CDNA,
    "gfx950": CDNA,
    "gfx1201": {
        "attention_prefill": {"rows": 32, "BLOCK_N": 16, "num_warps": 8, "num_stages": 1},
        "attention_decode": {"BLOCK_N": 16},
        "gemm_one": {"BLOCK_N": 2, "num_warps": 1},  # at most
        "moe_down": {"BLOCK_N": 2},
        "gemm_few": {"BLOCK_K": 128},
        "verify": {"queries": 4, "BV": 4, "num_warps": 2},  # at most, at most, at least
    },
}


def of(what: str, device: Device) -> Mapping[str, int]:
    """The settings of an architecture that stand for others, of 16-bit problems."""
    return TABLE.get(str(device.value("arch")), {}).get(what, {})
