"""Products with few rows: launches of ``few_rows.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from hal.errors import HalError
from hal.kernel import Site
from hal.layout import Packed
from hal_cuda.code.nvrtc import Function, Map, compiled, tensor_map
from hal_cuda.few_rows import BOX

Call = Callable[..., Any]
Launch = Mapping[str, int]
FILE = "few_rows.cu"
SWIZZLE = 1024  # bytes to which the stages are aligned
ALIGN = 16  # bytes, of addresses and strides


class Args(ctypes.Structure):
    """What the kernel is passed, in its order."""

    _fields_ = (
        ("weight", Map),
        ("x", Map),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
        ("rows", ctypes.c_int),
    )


def shape(launch: Launch) -> tuple[int, int]:
    """Rows of the weight, and of x, that a block of this launch takes."""
    one, other = 64 * launch["GROUPS"], launch["WIDTH"] * launch["CHUNKS"]
    return (other, one) if launch["LONG"] else (one, other)


def shared_bytes(launch: Launch) -> int:
    """Of a block, its alignment included."""
    return launch["STAGES"] * sum(shape(launch)) * BOX * 2 + SWIZZLE


def weight_map(weight: Tensor, rows: int, gated: bool) -> Map:
    """Boxes of so many rows; gated: of eight rows of gate and eight of up in turn."""
    whole, columns = weight.shape
    row = columns * 2
    if gated:
        half = whole // 2
        return tensor_map(weight.data_ptr(), (columns, 8, 2, half // 8), (row, half * row, 8 * row),
                          (BOX, 8, 2, rows // 16))  # fmt: skip
    return tensor_map(weight.data_ptr(), (columns, whole), (row,), (BOX, rows))


class Product:
    """``x [rows, K]`` times a weight ``[N, K]`` into ``out [rows, N]``.

    Gated: the weight is ``[gate; up]``, and out is ``silu(x gate.T) * (x up.T)``. ``launches``: by
    the most rows, what the code is compiled with, when so many rows first come.
    """

    def __init__(self, weight: Tensor, launches: Mapping[int, Launch], pdl: bool, arch: str, gated: bool) -> None:
        self.weight, self.launches, self.pdl, self.arch, self.gated = weight, launches, pdl, arch, gated
        self.outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        self._function = cache(self._function)  # type: ignore[method-assign]
        self._x_map = lru_cache(64)(tensor_map)

    def defines(self, most: int) -> dict[str, int]:
        """What the code is compiled with, for so many rows."""
        sizes = {"N": self.outputs, "K": self.weight.shape[1], "GATED": int(self.gated), "PDL": int(self.pdl)}
        return {**self.launches[most], **sizes}

    def compile(self, most: int) -> None:
        """Compile for so many rows; a device is not needed."""
        compiled(FILE, f"{self.arch}a", tuple(sorted(self.defines(most).items())))

    def _function(self, most: int) -> tuple[Function, int, int, Map]:
        """The kernel for so many rows, its blocks, the rows of x that they read, the map of the weight."""
        launch = self.launches[most]
        tile, rows = shape(launch)
        function = Function(
            FILE, "few_rows", f"{self.arch}a", self.defines(most),
            threads=128 * launch["GROUPS"] + 32, cluster=launch["SPLIT"], shared=shared_bytes(launch),
            overlaps=self.pdl,
        )  # fmt: skip
        blocks = -(-self.outputs // (tile // 2 if self.gated else tile)) * launch["SPLIT"]
        return function, blocks, rows, weight_map(self.weight, tile, self.gated)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        rows, columns = x.shape
        function, blocks, held, weight = self._function(next(most for most in self.launches if rows <= most))
        if x.data_ptr() % ALIGN or x.stride(0) * 2 % ALIGN:
            x = x.clone(memory_format=torch.contiguous_format)
        row = x.stride(0) if rows > 1 else columns
        given = self._x_map(x.data_ptr(), (columns, rows), (row * 2,), (BOX, held))
        function(blocks, Args(weight, given, out.data_ptr(), out.stride(0), rows))


def _product(site: Site, memory: str, gated: bool = False) -> Callable[[Tensor], Tensor]:
    weight, arch = site.weight(memory, Packed()), str(site.runtime.device.value("arch"))
    if weight.data_ptr() % ALIGN:
        raise HalError(f"{site.op.title()}: {memory}: expected an address that is a multiple of {ALIGN} bytes")
    settings = dict(site.settings)
    pdl = settings.pop("PDL")
    product = Product(weight, {int(most): launch for most, launch in settings.items()}, pdl, arch, gated)

    def run(x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], product.outputs), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            product(x, out)
        return out

    return run


def gemm(site: Site) -> Call:
    """``x @ weight.T``."""
    return _product(site, "weight")


def in_proj(site: Site) -> Call:
    """Norm, and one product whose outputs are column views."""
    norm, product, widths = site.parts["norm"], _product(site, "weight"), list(site.op.outputs().values())

    def run(partial: Tensor, residual: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x, residual = norm(partial, residual)
        return product(x).split(widths, 1), residual

    return run


def norm_gate_up(site: Site) -> Call:
    """Norm, and the product that multiplies its halves."""
    norm, product = site.parts["norm"], _product(site, "gate_up", gated=True)

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = norm(partial, residual)
        return product(x), residual

    return run
