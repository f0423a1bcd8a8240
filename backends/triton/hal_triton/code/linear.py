"""Products with few rows: ``x [rows, K] @ weight [N, K].T``, bounded by reading the weight once.

A program owns BLOCK_N rows of the weight, so the weight streams in pieces of contiguous K. Sums are
float32. Weights are read before the wait for earlier kernels (PDL): none in flight writes them.
"""

# Triton grows tuples by addition, unpacks none
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernel import Site
from hal.layout import Packed
from hal_triton.code.parts import begin, moved
from hal_triton.needs import cdiv, launched, next_power_of_2

Call = Callable[[Tensor], Tensor]
LEAST_DOT = 16  # the least size of each axis of tl.dot
STREAMED = tl.constexpr("evict_first")  # a weight is used once a step: it must not push x out


@triton.jit(do_not_specialize=["rows"])
def one_kernel(
    x_ptr, weight_ptr, out_ptr, x_row, rows,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply and add: BLOCK_N weight rows times all of x; DEPTH tiles of the weight are under way."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    inside = at[:, None] < N
    weights = weight_ptr + at[:, None] * K + column[None, :]
    ahead = ()
    for d in tl.static_range(DEPTH):
        mask = inside & (column < K - d * BLOCK_K)[None, :]
        ahead = ahead + (tl.load(weights + d * BLOCK_K, mask=mask, other=0.0, eviction_policy=STREAMED),)
    begin(PDL)
    sums = ()
    for _ in tl.static_range(ROWS):
        # eight products, what a thread loads at once, are added in its registers
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32),)
    for k in range(0, K, BLOCK_K):
        mask = inside & (column < K - k - DEPTH * BLOCK_K)[None, :]
        coming = tl.load(weights + k + DEPTH * BLOCK_K, mask=mask, other=0.0, eviction_policy=STREAMED)
        weight = ahead[0].to(tl.float32)
        added = ()
        for r in tl.static_range(ROWS):
            x = tl.load(x_ptr + r * x_row + k + column, mask=(column < K - k) & (r < rows), other=0.0)
            products = tl.reshape(weight * x.to(tl.float32)[None, :], (BLOCK_N, BLOCK_K // 8, 8))
            added = added + (sums[r] + tl.sum(products, 2),)
        sums = added
        ahead = moved(ahead, coming, DEPTH)
    for r in tl.static_range(ROWS):
        value = tl.sum(sums[r], 1).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + r * N + at, value, mask=(at < N) & (r < rows))


@triton.jit(do_not_specialize=["rows"])
def few_kernel(
    x_ptr, weight_ptr, out_ptr, x_row, rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``weight tile [BLOCK_N, BLOCK_K] @ x.T [BLOCK_K, BLOCK_M]``: N is the long side of the matrix instruction.

    DEPTH 0: the compiler keeps num_stages tiles under way in shared memory; else DEPTH tiles are under
    way in registers, the first before the wait. SPLIT programs share K; each writes its own
    ``out [SPLIT, rows, N]``.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    LENGTH: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT) * BLOCK_K
    first = tl.program_id(1) * LENGTH
    left = tl.minimum(K - first, LENGTH)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    inside = at[:, None] < N
    weights = weight_ptr + at[:, None] * K + (first + column)[None, :]
    taken = (row < rows)[:, None]
    xs = x_ptr + row[:, None].to(tl.int64) * x_row + (first + column)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    ahead = ()
    for d in tl.static_range(DEPTH):
        mask = inside & (column < left - d * BLOCK_K)[None, :]
        ahead = ahead + (tl.load(weights + d * BLOCK_K, mask=mask, other=0.0, eviction_policy=STREAMED),)
    begin(PDL)
    if DEPTH == 0:
        for k in range(0, LENGTH, BLOCK_K):
            mask = (column < left - k)[None, :]
            weight = tl.load(weights + k, mask=inside & mask, other=0.0, eviction_policy=STREAMED)
            x = tl.load(xs + k, mask=taken & mask, other=0.0)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        for k in tl.range(0, LENGTH, BLOCK_K, num_stages=1):
            mask = inside & (column < left - k - DEPTH * BLOCK_K)[None, :]
            coming = tl.load(weights + k + DEPTH * BLOCK_K, mask=mask, other=0.0, eviction_policy=STREAMED)
            x = tl.load(xs + k, mask=taken & (column < left - k)[None, :], other=0.0)
            total = tl.dot(ahead[0], tl.trans(x), total, input_precision="ieee")
            ahead = moved(ahead, coming, DEPTH)
    out = out_ptr + (tl.program_id(1) * rows + row[None, :]).to(tl.int64) * N + at[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside & (row < rows)[None, :])


@triton.jit(do_not_specialize=["count"])
def sum_kernel(
    partial_ptr, out_ptr, count, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``partial [SPLIT, count]`` to ``out [count]``, always in the order of the splits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(partial_ptr + split * count.to(tl.int64) + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < count)


SUM_BLOCK = 256


def product_one(x: Tensor, weight: Tensor, out: Tensor, settings: Mapping[str, Any]) -> None:
    """``x [rows, K]``, ``weight [N, K]`` to ``out [rows, N]`` without matrix instructions."""
    rows, (n, columns) = x.shape[0], weight.shape
    one_kernel[(cdiv(n, settings["BLOCK_N"]),)](
        x, weight, out, x.stride(0), rows, N=n, K=columns, ROWS=next_power_of_2(rows),
        enable_fp_fusion=True, **launched(settings),
    )  # fmt: skip


def product_few(x: Tensor, weight: Tensor, out: Tensor, settings: Mapping[str, Any]) -> None:
    """``x [rows, K]``, ``weight [N, K]`` to ``out [rows, N]``; one tile holds all rows of x."""
    rows, (n, columns), split = x.shape[0], weight.shape, settings["SPLIT"]
    target = out if split == 1 else torch.empty((split, rows, n), dtype=torch.float32, device=x.device)
    few_kernel[(cdiv(n, settings["BLOCK_N"]), split)](
        x, weight, target, x.stride(0), rows, N=n, K=columns, BLOCK_M=max(LEAST_DOT, next_power_of_2(rows)),
        enable_fp_fusion=True, **launched(settings),
    )  # fmt: skip
    if split > 1:
        summing = launched({"SPLIT": split, "BLOCK": SUM_BLOCK, "PDL": settings["PDL"], "num_warps": 2})
        sum_kernel[(cdiv(rows * n, SUM_BLOCK),)](target, out, rows * n, **summing)


def _loaded(site: Site, product: Callable[..., None]) -> Call:
    weight, settings = site.weight("weight", Packed()), site.settings

    def run(x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            product(x, weight, out, settings)
        return out

    return run


def one(site: Site) -> Call:
    return _loaded(site, product_one)


def few(site: Site) -> Call:
    return _loaded(site, product_few)


def _projected(site: Site, product: Callable[..., None]) -> Callable[..., Any]:
    norm, weight, settings = site.parts["norm"], site.weight("weight", Packed()), site.settings
    widths = list(site.op.outputs().values())

    def run(partial: Tensor, residual: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x, residual = norm(partial, residual)
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            product(x, weight, out, settings)
        return out.split(widths, 1), residual

    return run


def in_proj_one(site: Site) -> Callable[..., Any]:
    return _projected(site, product_one)


def in_proj_few(site: Site) -> Callable[..., Any]:
    return _projected(site, product_few)
