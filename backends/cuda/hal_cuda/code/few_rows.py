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
from hal_cuda.few_rows import BOX, TILE, WIDTHS

Call = Callable[..., Any]
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


def width(rows: int) -> tuple[int, int]:
    """Rows in one instruction, and how many of these are needed."""
    for one in WIDTHS:
        if rows <= one:
            return one, 1
    return WIDTHS[-1], -(-rows // WIDTHS[-1])


def weight_map(weight: Tensor, groups: int, gated: bool) -> Map:
    """Boxes of 64 x groups rows; gated: of eight rows of gate and eight of up in turn, that many times four."""
    rows, columns = weight.shape
    row = columns * 2
    if gated:
        half = rows // 2
        return tensor_map(weight.data_ptr(), (columns, 8, 2, half // 8), (row, half * row, 8 * row),
                          (BOX, 8, 2, 4 * groups))  # fmt: skip
    return tensor_map(weight.data_ptr(), (columns, rows), (row,), (BOX, TILE * groups))


class Product:
    """``x [rows, K]`` times a weight ``[N, K]`` into ``out [rows, N]``.

    Gated: the weight is ``[gate; up]``, and out is ``silu(x gate.T) * (x up.T)``. ``settings``: by
    width, GROUPS, SPLIT, STAGES, BOXES and SHARED of the launch; PDL. Code is compiled for a width when it first comes.
    """

    def __init__(self, weight: Tensor, settings: Mapping[str, Any], arch: str, gated: bool = False) -> None:
        self.weight, self.settings, self.arch, self.gated = weight, settings, arch, gated
        self.outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        self._function = cache(self._function)  # type: ignore[method-assign]
        self._x_map = lru_cache(64)(tensor_map)

    def defines(self, one: int, chunks: int) -> dict[str, int]:
        """What the code is compiled with, for so many rows."""
        given = {name: value for name, value in self.settings[str(one * chunks)].items() if name != "SHARED"}
        return {**given, "N": self.outputs, "K": self.weight.shape[1], "WIDTH": one,
                "CHUNKS": chunks, "GATED": int(self.gated), "PDL": int(self.settings["PDL"])}  # fmt: skip

    def compile(self, rows: int) -> None:
        """Compile for so many rows; a device is not needed."""
        compiled(FILE, f"{self.arch}a", tuple(sorted(self.defines(*width(rows)).items())))

    def _function(self, one: int, chunks: int) -> tuple[Function, int, Map]:
        """The kernel for so many rows, its blocks, and the map of the weight."""
        defines = self.defines(one, chunks)
        groups, split, stages, boxes = (defines[name] for name in ("GROUPS", "SPLIT", "STAGES", "BOXES"))
        shared = stages * boxes * (TILE * groups + one * chunks) * BOX * 2 + SWIZZLE
        shared = max(shared, self.settings[str(one * chunks)].get("SHARED", 0))
        function = Function(
            FILE, "few_rows", f"{self.arch}a", defines,
            threads=128 * groups + 32, cluster=split, shared=shared, overlaps=self.settings["PDL"],
        )  # fmt: skip
        columns = TILE * groups // (2 if self.gated else 1)
        blocks = -(-self.outputs // columns) * split
        return function, blocks, weight_map(self.weight, groups, self.gated)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        rows, columns = x.shape
        one, chunks = width(rows)
        function, blocks, weight = self._function(one, chunks)
        if x.data_ptr() % ALIGN or x.stride(0) * 2 % ALIGN:
            x = x.clone(memory_format=torch.contiguous_format)
        row = x.stride(0) if rows > 1 else columns
        given = self._x_map(x.data_ptr(), (columns, rows), (row * 2,), (BOX, one * chunks))
        function(blocks, Args(weight, given, out.data_ptr(), out.stride(0), rows))


def _product(site: Site, memory: str, gated: bool = False) -> Callable[[Tensor], Tensor]:
    weight, arch = site.weight(memory, Packed()), str(site.runtime.device.value("arch"))
    if weight.data_ptr() % ALIGN:
        raise HalError(f"{site.op.title()}: {memory}: expected an address that is a multiple of {ALIGN} bytes")
    product = Product(weight, site.settings, arch, gated)

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
