"""The cores of a Gated DeltaNet layer: launches of ``decode_core.cu`` and ``verify_core.cu``."""

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
from hal.layout import Packed, Ring, Tail
from hal_cuda.code.nvrtc import Function

WORD = 8  # bytes of four taps, or of a ring's four cells
LANE = 16  # most bytes of a row of the state that a lane moves at once


def _arguments(name: str, tables: tuple[str, ...], pools: tuple[str, ...]) -> type[ctypes.Structure]:
    """What a kernel is passed, in its order: pointers to the batch's ``tables`` and to ``pools`` among others."""
    projected = ("qkv", "z", "b", "a")
    fields = (
        *((field, ctypes.c_void_p) for field in projected),
        *((f"{field}_row", ctypes.c_int64) for field in projected),
        *((field, ctypes.c_void_p) for field in (*tables, *pools)),
        *((f"{field}_slot", ctypes.c_int64) for field in pools),
        *((field, ctypes.c_void_p) for field in ("taps", "a_log", "dt_bias", "norm", "out", "scale")),
        *((field, ctypes.c_float) for field in ("eps", "limit")),
    )
    return type(name, (ctypes.Structure,), {"_fields_": fields})


DecodeArgs = _arguments("DecodeArgs", ("slots", "contexts"), ("ring", "state"))
VerifyArgs = _arguments("VerifyArgs", ("slots", "contexts", "accepted", "starts"), ("ring", "state", "pending"))


class Core:
    """A site's parameters and the kernels of its launches: SPLIT blocks, a cluster, for a sequence and value head.

    Settings by the most sequences, ``more`` for any more; ``unaligned`` for states that lie at odd addresses.
    """

    def __init__(self, site: Site, file: str, name: str, arguments: type[ctypes.Structure], **sizes: int) -> None:
        op, settings, layout = site.op, dict(site.settings), site.layouts["conv"]
        self.op, self.arguments = op, arguments
        pdl, unaligned = bool(settings.pop("PDL")), settings.pop("unaligned")
        self.launches = [(int(most) if most != "more" else None, launch) for most, launch in settings.items()]
        assert isinstance(layout, Ring)
        weight = site.weight("conv_weight", Packed())
        self.weights = (weight, *(site.weight(n) for n in ("A_log", "dt_bias", "norm")))
        if weight.data_ptr() % WORD:
            raise HalError(f"{op.title()}: conv_weight: expected an address that is a multiple of {WORD} bytes")
        self.encode = isinstance(op.out, Quantized)
        self.kind = getattr(torch, op.out.value if self.encode else op.dtype)
        self.scale = site.scales["out"] if self.encode else self.weights[1]
        self.limit = op.out.limit if self.encode else 0.0
        sizes |= {
            "KEY_HEADS": op.key_heads,
            "HEADS": op.value_heads,
            "K": op.key_head_dim,
            "V": op.value_head_dim,
            "RING": layout.length,
            "WIDE": int(op.state_dtype == "float32"),
            "ENCODE": int(self.encode),
            "PDL": int(pdl),
        }
        arch = str(site.runtime.device.value("arch"))

        @cache
        def function(at: int | None) -> tuple[Function, int]:
            """The kernel of a launch, and its blocks for a sequence."""
            launch, aligned = (unaligned, 0) if at is None else (self.launches[at][1], 1)
            made = Function(
                file, name, arch, {**launch, **sizes, "ALIGNED": aligned},
                threads=32 * launch["WARPS"], cluster=launch["SPLIT"], overlaps=pdl,
            )  # fmt: skip
            return made, launch["SPLIT"] * op.value_heads

        self._function = function
        for at in range(len(self.launches)):
            function(at)

    def __call__(
        self, projected: tuple[Tensor, ...], tables: tuple[Tensor, ...], pools: tuple[Tensor, ...], sequences: int
    ) -> Any:
        """The output, once the kernel is launched for so many sequences."""
        rows, (ring, delta) = projected[0].shape[0], pools[:2]
        out = torch.empty((rows, self.op.value_dim), dtype=self.kind, device=projected[0].device)
        if sequences:
            slot = delta.stride(0) * delta.element_size()
            aligned = not (ring.data_ptr() % WORD or ring.stride(0) % 4 or delta.data_ptr() % LANE or slot % LANE)
            tensors = (*projected, *(x.stride(0) for x in projected), *tables, *pools, *(x.stride(0) for x in pools),
                       *self.weights, out, self.scale)  # fmt: skip
            given = (x.data_ptr() if isinstance(x, Tensor) else x for x in tensors)
            at = next(i for i, (most, _) in enumerate(self.launches) if most is None or sequences <= most)
            kernel, blocks = self._function(at if aligned else None)
            kernel(sequences * blocks, self.arguments(*given, self.op.eps, self.limit))
        return Encoded(out, self.scale) if self.encode else out


def decode(site: Site) -> Callable[..., Any]:
    """A row is a sequence."""
    core = Core(site, "decode_core.cu", "decode_core", DecodeArgs)

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor], batch: Batch) -> Any:
        return core(projected, (batch.slots, batch.contexts), state, projected[0].shape[0])

    return run


def verify(site: Site) -> Callable[..., Any]:
    """Any rows of each sequence, none to flush it."""
    op, tail = site.op, site.layouts["pending"]
    assert isinstance(tail, Tail)
    core = Core(site, "verify_core.cu", "verify_core", VerifyArgs, QUERIES=op.queries, TAIL=tail.length)

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Any:
        return core(
            projected, (batch.slots, batch.contexts, batch.accepted, batch.cu_seqlens), state, batch.sequences
        )  # fmt: skip

    return run
