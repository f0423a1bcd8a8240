"""Products with few rows: ``x [rows, K] @ weight [N, K].T``, bounded by reading the weight once.

A program owns BLOCK_N rows of the weight, so the weight streams in pieces of contiguous K. Sums are
float32. Weights are read before the wait for earlier kernels (PDL): none in flight writes them.
"""

# Triton grows tuples by addition, unpacks none
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
    x_ptr, partial_ptr, norm_ptr, weight_ptr, out_ptr, residual_ptr, x_row, rows, eps,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply and add: BLOCK_N rows of the weight times all of x; DEPTH tiles of the weight are under way.

    NORM: x is the residual; partial is added to it, and the sum, which program 0 writes, is normed.
    Its factor, known after the last tile, comes last. GATED: the weight is ``[gate; up]``, rows of
    both in turn, and out is ``silu(gate) * up``.
    """
    WIDTH: tl.constexpr = N // 2 if GATED else N
    each = tl.arange(0, BLOCK_N)
    if GATED:
        inner = tl.program_id(0).to(tl.int64) * (BLOCK_N // 2) + each // 2
        at = inner + each % 2 * WIDTH
        inside = (inner < WIDTH)[:, None]
    else:
        at = tl.program_id(0).to(tl.int64) * BLOCK_N + each
        inside = (at < N)[:, None]
    column = tl.arange(0, BLOCK_K)
    weights = weight_ptr + at[:, None] * K + column[None, :]
    ahead = ()
    for d in tl.static_range(DEPTH):
        mask = inside & (column < K - d * BLOCK_K)[None, :]
        ahead = ahead + (tl.load(weights + d * BLOCK_K, mask=mask, other=0.0, eviction_policy=STREAMED),)
    begin(PDL)
    sums = ()
    squares = ()
    for _ in tl.static_range(ROWS):
        # eight products, what a thread loads at once, are added in its registers
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32),)
        squares = squares + (tl.zeros((BLOCK_K,), tl.float32),)
    for k in range(0, K, BLOCK_K):
        mask = inside & (column < K - k - DEPTH * BLOCK_K)[None, :]
        coming = tl.load(weights + k + DEPTH * BLOCK_K, mask=mask, other=0.0, eviction_policy=STREAMED)
        weight = ahead[0].to(tl.float32)
        left = column < K - k
        if NORM:
            scale = 1.0 + tl.load(norm_ptr + k + column, mask=left, other=0.0).to(tl.float32)
        added = ()
        more = ()
        for r in tl.static_range(ROWS):
            taken = left & (r < rows)
            x = tl.load(x_ptr + r * x_row + k + column, mask=taken, other=0.0).to(tl.float32)
            if NORM:
                x += tl.load(partial_ptr + r * K + k + column, mask=taken, other=0.0).to(tl.float32)
                rounded = x.to(residual_ptr.dtype.element_ty)
                first = taken & (tl.program_id(0) == 0)
                tl.store(residual_ptr + r * K + k + column, rounded, mask=first)
                x = rounded.to(tl.float32)
                more = more + (squares[r] + x * x,)
                x *= scale
            products = tl.reshape(weight * x[None, :], (BLOCK_N, BLOCK_K // 8, 8))
            added = added + (sums[r] + tl.sum(products, 2),)
        sums = added
        if NORM:
            squares = more
        ahead = moved(ahead, coming, DEPTH)
    for r in tl.static_range(ROWS):
        value = tl.sum(sums[r], 1)
        if NORM:
            value *= tl.rsqrt(tl.sum(squares[r], 0) / K + eps)
        if GATED:
            gate, up = tl.split(tl.reshape(value, (BLOCK_N // 2, 2)))
            value = gate * tl.sigmoid(gate) * up
            place = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        else:
            place = at
        kept = (place < WIDTH) & (r < rows)
        tl.store(out_ptr + r * WIDTH + place, value.to(out_ptr.dtype.element_ty), mask=kept)


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


class Normed(NamedTuple):
    """What a product's own norm takes: x is then the residual, whose sum with partial goes to ``residual``."""

    partial: Tensor
    weight: Tensor
    residual: Tensor
    eps: float


def product_one(
    x: Tensor, weight: Tensor, out: Tensor, settings: Mapping[str, Any], gated: bool = False,
    normed: Normed | None = None,
) -> None:  # fmt: skip
    """``x [rows, K]``, ``weight [N, K]`` to ``out [rows, N]`` without matrix instructions.

    ``gated``: the weight is ``[gate; up]``, and ``silu(x @ gate.T) * (x @ up.T)`` goes to ``out [rows, N / 2]``.
    """
    rows, (n, columns) = x.shape[0], weight.shape
    partial, norm, residual, eps = normed or (x, x, x, 0.0)
    one_kernel[(cdiv(n, settings["BLOCK_N"]),)](
        x, partial, norm, weight, out, residual, x.stride(0), rows, eps, N=n, K=columns, ROWS=next_power_of_2(rows),
        NORM=normed is not None, GATED=gated, enable_fp_fusion=True, **launched(settings),
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


def _opened(site: Site, memory: str, gated: bool = False) -> Callable[..., Any]:
    """Add, norm and product of a row or two: one launch, or the norm apart where it reduces over ranks."""
    weight, settings, apart = site.weight(memory, Packed()), site.settings, site.parts.get("norm")
    norm, eps = None if apart else site.weight("norm"), site.op.eps
    width = weight.shape[0] // 2 if gated else weight.shape[0]

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        rows = residual.shape[0]
        out = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
        if apart:
            x, after = apart(partial, residual)
        else:
            x, after = residual, torch.empty_like(residual)
        if rows:
            normed = None if norm is None else Normed(partial, norm, after, eps)
            product_one(x, weight, out, settings, gated, normed)
        return out, after

    return run


def in_proj_one(site: Site) -> Callable[..., Any]:
    run, widths = _opened(site, "weight"), list(site.op.outputs().values())

    def split(partial: Tensor, residual: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        out, residual = run(partial, residual)
        return out.split(widths, 1), residual

    return split


def norm_linear_one(site: Site) -> Callable[..., Any]:
    return _opened(site, "weight")


def norm_gate_up_one(site: Site) -> Callable[..., Any]:
    return _opened(site, "gate_up", gated=True)


def in_proj_few(site: Site) -> Callable[..., Any]:
    norm, product, widths = site.parts["norm"], few(site), list(site.op.outputs().values())

    def run(partial: Tensor, residual: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x, residual = norm(partial, residual)
        return product(x).split(widths, 1), residual

    return run
