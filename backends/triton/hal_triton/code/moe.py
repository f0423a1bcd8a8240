"""Mixtures of experts. Nothing about the routing is read on the host.

Pair ``p = row * top_k + k`` is the k-th choice of a row; pair ``rows * top_k + row`` is its
shared expert, whose id is EXPERTS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.kernel import Site
from hal.layout import Packed
from hal_triton.needs import cdiv, next_power_of_2

Call = Callable[..., Any]


@triton.jit
def _choose(logits_ptr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr):
    """Ids ``[K_BLOCK]`` and weights (sum 1) of a row's largest logits; the lower id wins a tie."""
    expert, place = tl.arange(0, E_BLOCK), tl.arange(0, K_BLOCK)
    left = tl.load(logits_ptr + expert, mask=expert < EXPERTS, other=float("-inf"))
    peak = tl.max(left, 0)
    ids = tl.zeros([K_BLOCK], tl.int32)
    # softmax over all, renormalised over the chosen: its sum cancels
    weights = tl.zeros([K_BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        most = tl.max(left, 0)
        # NaN equals nothing; any expert that exists will do
        best = tl.minimum(tl.min(tl.where(left == most, expert, E_BLOCK), 0), EXPERTS - 1)
        ids = tl.where(place == k, best, ids)
        weights = tl.where(place == k, tl.exp(most - peak), weights)
        left = tl.where(expert == best, float("-inf"), left)
    return ids, weights / tl.sum(weights, 0)


@triton.jit
def _product(x_ptr, w_ptr, n, inside, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``w[n] . x`` for rows n ``[BLOCK_N]`` of w ``[., K]``, in float32."""
    partial = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + n[:, None] * K + column[None, :], mask=inside[:, None] & (column < K)[None, :], other=0.0)
        partial += w.to(tl.float32) * x[None, :]
    return tl.sum(partial, 1)


@triton.jit
def few_logits_kernel(
    x_ptr, router_ptr, sigmoid_ptr, logits_ptr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (row, block of experts): logits ``[rows, EXPERTS + 1]`` float32, the last the shared expert's gate."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < EXPERTS
    x_ptr += row * HIDDEN
    logits_ptr += row * (EXPERTS + 1)
    if tl.program_id(1) * BLOCK_N < EXPERTS:
        tl.store(logits_ptr + n, _product(x_ptr, router_ptr, n, inside, HIDDEN, BLOCK_N, BLOCK_K), mask=inside)
    else:
        only = tl.arange(0, BLOCK_N) == 0
        gate = _product(x_ptr, sigmoid_ptr, tl.arange(0, BLOCK_N), only, HIDDEN, BLOCK_N, BLOCK_K)
        tl.store(logits_ptr + EXPERTS + tl.arange(0, BLOCK_N), gate, mask=only)


@triton.jit
def few_gate_up_kernel(
    x_ptr, logits_ptr, experts_ptr, shared_ptr, wide_ptr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, SHARED: tl.constexpr,
    WIDEST: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (row, choice, block of outputs): ``silu(gate) * up`` to wide ``[rows, TOP_K + 1, WIDEST]``."""
    row, k, n = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptr, inter = shared_ptr, SHARED
    if k < TOP_K:
        ids, _ = _choose(logits_ptr + row * (EXPERTS + 1), EXPERTS, TOP_K, E_BLOCK, K_BLOCK)
        expert = tl.sum(tl.where(tl.arange(0, K_BLOCK) == k, ids, 0), 0).to(tl.int64)
        w_ptr, inter = experts_ptr + expert * (2 * INTER * HIDDEN), INTER
    inside = n < inter
    x_ptr += row * HIDDEN
    gate = _product(x_ptr, w_ptr, n, inside, HIDDEN, BLOCK_N, BLOCK_K)
    up = _product(x_ptr, w_ptr + inter * HIDDEN, n, inside, HIDDEN, BLOCK_N, BLOCK_K)
    value = gate * tl.sigmoid(gate) * up
    at = (row * (TOP_K + 1) + k) * WIDEST + n
    tl.store(wide_ptr + at, value.to(wide_ptr.dtype.element_ty), mask=inside)


@triton.jit
def few_down_kernel(
    wide_ptr, logits_ptr, experts_ptr, shared_ptr, out_ptr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, SHARED: tl.constexpr,
    WIDEST: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (row, block of outputs): the chosen experts' values, weighed, and the shared one's."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    logits_ptr += row * (EXPERTS + 1)
    wide_ptr += row * (TOP_K + 1) * WIDEST
    shared = _product(wide_ptr + TOP_K * WIDEST, shared_ptr, n, inside, SHARED, BLOCK_N, BLOCK_K)
    total = shared * tl.sigmoid(tl.load(logits_ptr + EXPERTS))
    ids, weights = _choose(logits_ptr, EXPERTS, TOP_K, E_BLOCK, K_BLOCK)
    place = tl.arange(0, K_BLOCK)
    for k in tl.static_range(TOP_K):
        expert = tl.sum(tl.where(place == k, ids, 0), 0).to(tl.int64)
        w_ptr = experts_ptr + expert * (HIDDEN * INTER)
        value = _product(wide_ptr + k * WIDEST, w_ptr, n, inside, INTER, BLOCK_N, BLOCK_K)
        total += value * tl.sum(tl.where(place == k, weights, 0.0), 0)
    tl.store(out_ptr + row * HIDDEN + n, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def logits_kernel(
    x_ptr, router_ptr, logits_ptr, rows, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, block of experts): logits ``[rows, EXPERTS]`` float32."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _tile(x_ptr, m, m < rows, router_ptr, n, n < EXPERTS, HIDDEN, HIDDEN, BLOCK_M, BLOCK_N, BLOCK_K)
    inside = (m < rows)[:, None] & (n < EXPERTS)[None, :]
    tl.store(logits_ptr + m[:, None] * EXPERTS + n[None, :], total, mask=inside)


@triton.jit
def choose_kernel(
    x_ptr, logits_ptr, sigmoid_ptr, ids_ptr, weights_ptr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr,
    E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program row: ids ``[rows, TOP_K]``, weights ``[rows, TOP_K + 1]``, the last sigmoid(x . shared gate)."""
    row, place, column = tl.program_id(0).to(tl.int64), tl.arange(0, K_BLOCK), tl.arange(0, BLOCK)
    ids, weights = _choose(logits_ptr + row * EXPERTS, EXPERTS, TOP_K, E_BLOCK, K_BLOCK)
    tl.store(ids_ptr + row * TOP_K + place, ids, mask=place < TOP_K)
    tl.store(weights_ptr + row * (TOP_K + 1) + place, weights, mask=place < TOP_K)
    x = tl.load(x_ptr + row * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    gate = tl.load(sigmoid_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    tl.store(weights_ptr + row * (TOP_K + 1) + TOP_K, tl.sigmoid(tl.sum(x * gate, 0)))


@triton.jit
def group_kernel(
    ids_ptr, order_ptr, tiles_ptr, pairs, rows, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK pairs): their places in the order by expert, and the tiles that start there.

    Tile ``[3]``: expert, first place in the order, how many. Row r of the shared expert lies at ``pairs + r``.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, total = pair < pairs, pairs + rows
    mine = tl.load(ids_ptr + pair, mask=inside, other=EXPERTS)
    before, within, count = (tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32))
    for first in range(0, pairs, CHUNK):
        other = first + tl.arange(0, CHUNK)
        theirs = tl.load(ids_ptr + other, mask=other < pairs, other=EXPERTS + 1)
        same = theirs[None, :] == mine[:, None]
        before += tl.sum((theirs[None, :] < mine[:, None]).to(tl.int32), 1)
        within += tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), 1)
        count += tl.sum(same.to(tl.int32), 1)
    # the shared expert: all rows, after all pairs
    within = tl.where(inside, within, pair - pairs)
    count = tl.where(inside, count, rows)
    at = tl.where(inside, before + within, pair)
    tl.store(order_ptr + at, pair, mask=pair < total)
    size = tl.where(within % BLOCK_M == 0, tl.minimum(count - within, BLOCK_M), 0)
    tl.store(tiles_ptr + at * 3, mine, mask=pair < total)
    tl.store(tiles_ptr + at * 3 + 1, at, mask=pair < total)
    tl.store(tiles_ptr + at * 3 + 2, size, mask=pair < total)


@triton.jit
def _tile(
    x_ptr, row, real, w_ptr, n, inside, stride, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``x[row] . w[n]`` for ``[BLOCK_M, BLOCK_N]`` in float32; rows of x are ``stride`` apart, of w ``K``."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)
        some = column < K
        x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=real[:, None] & some[None, :], other=0.0)
        w = tl.load(w_ptr + n[None, :] * K + column[:, None], mask=inside[None, :] & some[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def gate_up_kernel(
    x_ptr, order_ptr, tiles_ptr, experts_ptr, shared_ptr, wide_ptr, pairs,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, SHARED: tl.constexpr,
    WIDEST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, tile): ``silu(gate) * up`` of its pairs to wide ``[pairs + rows, WIDEST]``."""
    tiles_ptr += tl.program_id(1) * 3
    expert, first, count = tl.load(tiles_ptr).to(tl.int64), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2)
    m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = m < count
    pair = tl.load(order_ptr + first + m, mask=real, other=0).to(tl.int64)
    w_ptr, inter, row = shared_ptr, SHARED, pair - pairs
    if expert < EXPERTS:
        w_ptr, inter, row = experts_ptr + expert * (2 * INTER * HIDDEN), INTER, pair // TOP_K
    if (count > 0) & (tl.program_id(0) * BLOCK_N < inter):
        inside = n < inter
        gate = _tile(x_ptr, row, real, w_ptr, n, inside, HIDDEN, HIDDEN, BLOCK_M, BLOCK_N, BLOCK_K)
        w_ptr += inter * HIDDEN
        up = _tile(x_ptr, row, real, w_ptr, n, inside, HIDDEN, HIDDEN, BLOCK_M, BLOCK_N, BLOCK_K)
        value = (gate * tl.sigmoid(gate) * up).to(wide_ptr.dtype.element_ty)
        tl.store(wide_ptr + pair[:, None] * WIDEST + n[None, :], value, mask=real[:, None] & inside[None, :])


@triton.jit
def down_kernel(
    wide_ptr, order_ptr, tiles_ptr, experts_ptr, shared_ptr, value_ptr,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, SHARED: tl.constexpr,
    WIDEST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, tile): values ``[pairs + rows, HIDDEN]`` of its pairs, not weighed yet."""
    tiles_ptr += tl.program_id(1) * 3
    expert, first, count = tl.load(tiles_ptr).to(tl.int64), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2)
    m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real, inside = m < count, n < HIDDEN
    pair = tl.load(order_ptr + first + m, mask=real, other=0).to(tl.int64)
    w_ptr, inter = shared_ptr, SHARED
    if expert < EXPERTS:
        w_ptr, inter = experts_ptr + expert * (HIDDEN * INTER), INTER
    if count > 0:
        value = _tile(wide_ptr, pair, real, w_ptr, n, inside, WIDEST, inter, BLOCK_M, BLOCK_N, BLOCK_K)
        at = pair[:, None] * HIDDEN + n[None, :]
        tl.store(value_ptr + at, value.to(value_ptr.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def weigh_kernel(
    value_ptr, weights_ptr, out_ptr, pairs, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): the values of its pairs and of the shared expert, weighed."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    weights_ptr += row * (TOP_K + 1)
    total = tl.load(value_ptr + (pairs + row) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    total *= tl.load(weights_ptr + TOP_K)
    for k in tl.static_range(TOP_K):
        value = tl.load(value_ptr + (row * TOP_K + k) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weights_ptr + k)
    tl.store(out_ptr + row * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def few(site: Site) -> Call:
    op, norm, set_ = site.op, site.parts["norm"], site.settings
    router, sigmoid = site.weight("router"), site.weight("shared_sigmoid")
    gate_up, down = site.weight("experts_gate_up"), site.weight("experts_down")
    shared_gate_up, shared_down = site.weight("shared_gate_up", Packed()), site.weight("shared_down")
    widest = max(op.intermediate, op.shared_intermediate)
    sizes = {
        "EXPERTS": op.experts, "TOP_K": op.top_k, "HIDDEN": op.hidden, "INTER": op.intermediate,
        "SHARED": op.shared_intermediate, "WIDEST": widest,
        "E_BLOCK": next_power_of_2(op.experts), "K_BLOCK": next_power_of_2(op.top_k),
    }  # fmt: skip

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = norm(partial, residual)
        rows, out = x.shape[0], torch.empty_like(x)
        if not rows:
            return out, residual
        logits = torch.empty((rows, op.experts + 1), dtype=torch.float32, device=x.device)
        wide = torch.empty((rows, op.top_k + 1, widest), dtype=x.dtype, device=x.device)
        few_logits_kernel[(rows, cdiv(op.experts, set_["logits"]["BLOCK_N"]) + 1)](
            x, router, sigmoid, logits, EXPERTS=op.experts, HIDDEN=op.hidden, **set_["logits"]
        )
        few_gate_up_kernel[(rows, op.top_k + 1, cdiv(widest, set_["gate_up"]["BLOCK_N"]))](
            x, logits, gate_up, shared_gate_up, wide, **sizes, **set_["gate_up"]
        )
        few_down_kernel[(rows, cdiv(op.hidden, set_["down"]["BLOCK_N"]))](
            wide, logits, down, shared_down, out, **sizes, **set_["down"]
        )
        return out, residual

    return run


def _by_comparing(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor]:
    rows, pairs = ids.shape[0], ids.numel()
    order = torch.empty(pairs + rows, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((pairs + rows, 3), dtype=torch.int32, device=ids.device)
    group_kernel[(cdiv(pairs + rows, 16),)](
        ids, order, tiles, pairs, rows, EXPERTS=experts, BLOCK_M=block, BLOCK=16, CHUNK=128, num_warps=4
    )
    return order, tiles


def _by_sorting(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor]:
    rows, pairs = ids.shape[0], ids.numel()
    every = torch.cat([ids.flatten(), ids.new_full((rows,), experts)])
    sorted_ids, order = every.sort(stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(experts + 2, dtype=ids.dtype, device=ids.device))
    ends = ((bounds.diff() + block - 1) // block).cumsum(0)  # in tiles, of each expert
    tile = torch.arange(cdiv(pairs, block) + experts + cdiv(rows, block), device=ids.device)
    expert = torch.searchsorted(ends, tile, right=True).clamp(max=experts)
    before = torch.where(expert > 0, ends[expert - 1], 0)
    first = bounds[expert] + (tile - before) * block
    count = (bounds[expert + 1] - first).clamp(0, block)
    return order, torch.stack([expert, first, count], 1).int()


def _grouped(site: Site, group: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]) -> Call:
    op, norm, settings = site.op, site.parts["norm"], site.settings
    router, sigmoid = site.weight("router"), site.weight("shared_sigmoid")
    gate_up, down = site.weight("experts_gate_up"), site.weight("experts_down")
    shared_gate_up, shared_down = site.weight("shared_gate_up", Packed()), site.weight("shared_down")
    widest, block_n = max(op.intermediate, op.shared_intermediate), settings["BLOCK_N"]
    sizes = {"EXPERTS": op.experts, "HIDDEN": op.hidden}
    inner = sizes | {"INTER": op.intermediate, "SHARED": op.shared_intermediate, "WIDEST": widest}
    top_k, e_block, k_block = op.top_k, next_power_of_2(op.experts), next_power_of_2(op.top_k)

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = norm(partial, residual)
        rows, pairs, out, place = x.shape[0], x.shape[0] * top_k, torch.empty_like(x), x.device
        if not rows:
            return out, residual
        logits = torch.empty((rows, op.experts), dtype=torch.float32, device=place)
        ids = torch.empty((rows, top_k), dtype=torch.int32, device=place)
        weights = torch.empty((rows, top_k + 1), dtype=torch.float32, device=place)
        wide = torch.empty((pairs + rows, widest), dtype=x.dtype, device=place)
        value = torch.empty((pairs + rows, op.hidden), dtype=x.dtype, device=place)
        logits_kernel[(cdiv(rows, settings["BLOCK_M"]), cdiv(op.experts, block_n))](
            x, router, logits, rows, **sizes, **settings
        )
        choose_kernel[(rows,)](
            x, logits, sigmoid, ids, weights, TOP_K=top_k, E_BLOCK=e_block, K_BLOCK=k_block,
            BLOCK=next_power_of_2(op.hidden), num_warps=4, **sizes,
        )  # fmt: skip
        order, tiles = group(ids, op.experts, settings["BLOCK_M"])
        # blocks of outputs run beside each other, so a tile's rows stay in the cache
        gate_up_kernel[(cdiv(widest, block_n), tiles.shape[0])](
            x, order, tiles, gate_up, shared_gate_up, wide, pairs, TOP_K=top_k, **inner, **settings
        )
        down_kernel[(cdiv(op.hidden, block_n), tiles.shape[0])](
            wide, order, tiles, down, shared_down, value, **inner, **settings
        )
        weigh_kernel[(rows, cdiv(op.hidden, 512))](
            value, weights, out, pairs, TOP_K=top_k, HIDDEN=op.hidden, BLOCK=512, num_warps=4
        )
        return out, residual

    return run


def some(site: Site) -> Call:
    return _grouped(site, _by_comparing)


def sorted_by_expert(site: Site) -> Call:
    return _grouped(site, _by_sorting)
