"""The decode core of a Gated DeltaNet layer: launches of ``decode_core.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hal.batch import Batch
from hal.errors import HalError
from hal.formats import Encoded, Quantized
from hal.kernel import Site
from hal.layout import Packed, Ring
from hal_cuda.code.nvrtc import Function

WORD = 8  # bytes of four taps, or of a ring's four cells
LANE = 16  # most bytes of a row of the state that a lane moves at once


class Args(ctypes.Structure):
    """What the kernel is passed, in its order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "z", "b", "a")),
        *((name, ctypes.c_int64) for name in ("qkv_row", "z_row", "b_row", "a_row")),
        *((name, ctypes.c_void_p) for name in ("slots", "contexts", "ring", "state")),
        *((name, ctypes.c_int64) for name in ("ring_slot", "state_slot")),
        *((name, ctypes.c_void_p) for name in ("taps", "a_log", "dt_bias", "norm", "out", "scale")),
        *((name, ctypes.c_float) for name in ("eps", "limit")),
    )


def decode(site: Site) -> Callable[..., Any]:
    """SPLIT blocks, a cluster, for a row and value head.

    Settings by the most rows, ``more`` for any more; ``unaligned`` for states that lie at odd addresses.
    """
    op, settings, layout = site.op, dict(site.settings), site.layouts["conv"]
    pdl, unaligned = bool(settings.pop("PDL")), settings.pop("unaligned")
    launches = [(int(most) if most != "more" else None, launch) for most, launch in settings.items()]
    assert isinstance(layout, Ring)
    weight, small = site.weight("conv_weight", Packed()), [site.weight(n) for n in ("A_log", "dt_bias", "norm")]
    if weight.data_ptr() % WORD:
        raise HalError(f"{op.title()}: conv_weight: expected an address that is a multiple of {WORD} bytes")
    encode = isinstance(op.out, Quantized)
    kind = getattr(torch, op.out.value if encode else op.dtype)
    scale = site.scales["out"] if encode else small[0]
    limit = op.out.limit if encode else 0.0
    sizes = {
        "KEY_HEADS": op.key_heads,
        "HEADS": op.value_heads,
        "K": op.key_head_dim,
        "V": op.value_head_dim,
        "RING": layout.length,
        "WIDE": int(op.state_dtype == "float32"),
        "ENCODE": int(encode),
        "PDL": int(pdl),
    }
    arch = str(site.runtime.device.value("arch"))

    @cache
    def function(at: int | None) -> tuple[Function, int]:
        """The kernel of a launch, and its blocks for a row."""
        launch, aligned = (unaligned, 0) if at is None else (launches[at][1], 1)
        made = Function(
            "decode_core.cu", "decode_core", arch, {**launch, **sizes, "ALIGNED": aligned},
            threads=32 * launch["WARPS"], cluster=launch["SPLIT"], overlaps=pdl,
        )  # fmt: skip
        return made, launch["SPLIT"] * op.value_heads

    for at in range(len(launches)):
        function(at)

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor], batch: Batch) -> Any:
        (ring, delta), rows = state, projected[0].shape[0]
        out = torch.empty((rows, op.value_dim), dtype=kind, device=projected[0].device)
        if rows:
            slot = delta.stride(0) * delta.element_size()
            aligned = not (ring.data_ptr() % WORD or ring.stride(0) % 4 or delta.data_ptr() % LANE or slot % LANE)
            tensors = (*projected, *(x.stride(0) for x in projected), batch.slots, batch.contexts, ring, delta,
                       ring.stride(0), delta.stride(0), weight, *small, out, scale)  # fmt: skip
            given = (x.data_ptr() if isinstance(x, Tensor) else x for x in tensors)
            at = next(i for i, (most, _) in enumerate(launches) if most is None or rows <= most)
            kernel, blocks = function(at if aligned else None)
            kernel(rows * blocks, Args(*given, op.eps, limit))
        return Encoded(out, scale) if encode else out

    return run
