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
from hal_triton.code.parts import begin
from hal_triton.needs import cdiv, launched, next_power_of_2

Call = Callable[..., Any]


@triton.jit
def _choose(logits_ptr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr):
    """Ids ``[K_BLOCK]`` and weights (sum 1) of a row's largest logits; the lower id wins a tie.

    Bits of a float, those of a negative one turned round, are in the order of the floats; with the
    id behind them one maximum finds both. NaN is above or below all: some expert that exists.
    """
    expert, place = tl.arange(0, E_BLOCK), tl.arange(0, K_BLOCK)
    logits = tl.load(logits_ptr + expert, mask=expert < EXPERTS, other=0.0, cache_modifier=".cg")
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 is 0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    left = (bits.to(tl.int64) << 32) | (E_BLOCK - 1 - expert).to(tl.int64)
    least = -0x7FFFFFFFFFFFFFFF
    left = tl.where(expert < EXPERTS, left, least)
    ids = tl.zeros([K_BLOCK], tl.int32)
    largest = tl.zeros([K_BLOCK], tl.int32)
    for k in tl.static_range(TOP_K):
        most = tl.max(left, 0)
        ids = tl.where(place == k, E_BLOCK - 1 - (most & (E_BLOCK - 1)).to(tl.int32), ids)
        largest = tl.where(place == k, (most >> 32).to(tl.int32), largest)
        left = tl.where(left == most, least, left)
    largest ^= (largest >> 31) & 0x7FFFFFFF
    value = largest.to(tl.float32, bitcast=True)
    value = tl.where(place < TOP_K, value, float("-inf"))
    # softmax over all, renormalised over the chosen: its sum cancels
    weights = tl.exp(value - tl.max(value, 0))
    return ids, weights / tl.sum(weights, 0)


@triton.jit
def _choice(
    logits_ptr, ids_ptr, weights_ptr, row, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's ids ``[rows, TOP_K]`` and weights ``[rows, TOP_K + 1]``, the last the shared expert's."""
    place = tl.arange(0, K_BLOCK)
    ids, weights = _choose(logits_ptr, EXPERTS, TOP_K, E_BLOCK, K_BLOCK)
    tl.store(ids_ptr + row * TOP_K + place, ids, mask=place < TOP_K)
    weights_ptr += row * (TOP_K + 1)
    tl.store(weights_ptr + place, weights, mask=place < TOP_K)
    tl.store(weights_ptr + TOP_K, tl.sigmoid(tl.load(logits_ptr + EXPERTS, cache_modifier=".cg")))


@triton.jit
def few_opening_kernel(
    x_ptr, partial_ptr, norm_ptr, router_ptr, sigmoid_ptr, residual_ptr, normed_ptr, logits_ptr, ids_ptr, weights_ptr,
    counter_ptr, eps, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, NORM: tl.constexpr,
    E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHOOSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, block of experts): ``logits [rows, EXPERTS + 1]``, the last the shared expert's gate.

    NORM: x is the residual; partial is added to it, and the sum, which block 0 writes, is normed.
    CHOOSE: the last program of a row to be done chooses its experts.
    """
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    some = column < HIDDEN
    at = tl.where(n[:, None] < EXPERTS, router_ptr + n[:, None] * HIDDEN, sigmoid_ptr) + column[None, :]
    weight = tl.load(at, mask=(n <= EXPERTS)[:, None] & some[None, :], other=0.0)
    if NORM:
        scale = 1.0 + tl.load(norm_ptr + column, mask=some, other=0.0).to(tl.float32)
    begin(PDL)
    x = tl.load(x_ptr + row * HIDDEN + column, mask=some, other=0.0)
    if NORM:
        kind = residual_ptr.dtype.element_ty
        both = x.to(tl.float32) + tl.load(partial_ptr + row * HIDDEN + column, mask=some, other=0.0).to(tl.float32)
        both = both.to(kind)
        wide = both.to(tl.float32)
        x = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps) * scale).to(kind)
        first = some & (tl.program_id(1) == 0)
        tl.store(residual_ptr + row * HIDDEN + column, both, mask=first)
        tl.store(normed_ptr + row * HIDDEN + column, x, mask=first)
    logits_ptr += row * (EXPERTS + 1)
    tl.store(logits_ptr + n, tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], 1), mask=n <= EXPERTS)
    if CHOOSE:
        # every thread's logits lie before the count; the last to count sees all
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
            _choice(logits_ptr, ids_ptr, weights_ptr, row, EXPERTS, TOP_K, E_BLOCK, K_BLOCK)
            tl.store(counter_ptr + row, 0)


@triton.jit
def few_choose_kernel(
    logits_ptr, ids_ptr, weights_ptr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    E_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): its experts, where the opening leaves the choice."""
    row = tl.program_id(0).to(tl.int64)
    _choice(logits_ptr + row * (EXPERTS + 1), ids_ptr, weights_ptr, row, EXPERTS, TOP_K, E_BLOCK, K_BLOCK)


@triton.jit
def few_gate_up_kernel(
    x_ptr, ids_ptr, experts_ptr, shared_ptr, wide_ptr,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, SHARED: tl.constexpr, WIDEST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, choice, block of outputs): ``silu(gate) * up`` to wide ``[rows, TOP_K + 1, WIDEST]``."""
    row, k, n = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin(PDL)
    w_ptr, inter = shared_ptr, SHARED
    if k < TOP_K:
        w_ptr, inter = experts_ptr + tl.load(ids_ptr + row * TOP_K + k).to(tl.int64) * (2 * INTER * HIDDEN), INTER
    inside = (n < inter)[:, None]
    w_ptr += n[:, None] * HIDDEN
    gates, ups = (tl.zeros([BLOCK_N, BLOCK_K], tl.float32), tl.zeros([BLOCK_N, BLOCK_K], tl.float32))
    for first in range(0, HIDDEN, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        mask = inside & (column < HIDDEN)[None, :]
        gate = tl.load(w_ptr + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        up = tl.load(w_ptr + inter * HIDDEN + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + row * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gates += gate.to(tl.float32) * x
        ups += up.to(tl.float32) * x
    gate = tl.sum(gates, 1)
    value = gate * tl.sigmoid(gate) * tl.sum(ups, 1)
    at = (row * (TOP_K + 1) + k) * WIDEST + n
    tl.store(wide_ptr + at, value.to(wide_ptr.dtype.element_ty), mask=n < inter)


@triton.jit
def _weighed(
    total, x_ptr, weight, w_ptr, n, inside, K,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``total [BLOCK_N, BLOCK_K]`` and the products of ``w[n] [., K]`` with x, times a weight: not summed yet."""
    for first in range(0, K, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        mask = inside[:, None] & (column < K)[None, :]
        w = tl.load(w_ptr + n[:, None] * K + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32) * weight
        total += w.to(tl.float32) * x[None, :]
    return total


@triton.jit
def few_down_kernel(
    wide_ptr, ids_ptr, weights_ptr, experts_ptr, shared_ptr, out_ptr,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, SHARED: tl.constexpr, WIDEST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, block of outputs): the chosen experts' values, weighed, and the shared one's."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin(PDL)
    inside = n < HIDDEN
    wide_ptr += row * (TOP_K + 1) * WIDEST
    weights_ptr += row * (TOP_K + 1)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    weight = tl.load(weights_ptr + TOP_K)
    total = _weighed(total, wide_ptr + TOP_K * WIDEST, weight, shared_ptr, n, inside, SHARED, BLOCK_K)
    for k in tl.static_range(TOP_K):
        w_ptr = experts_ptr + tl.load(ids_ptr + row * TOP_K + k).to(tl.int64) * (HIDDEN * INTER)
        weight = tl.load(weights_ptr + k)
        total = _weighed(total, wide_ptr + k * WIDEST, weight, w_ptr, n, inside, INTER, BLOCK_K)
    tl.store(out_ptr + row * HIDDEN + n, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=inside)


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
    """Counters belong to this binding; the norm is in the first launch, or apart where it reduces over ranks."""
    op, apart, set_ = site.op, site.parts.get("norm"), {k: v for k, v in site.settings.items() if k != "rows"}
    router, sigmoid = site.weight("router"), site.weight("shared_sigmoid")
    gate_up, down = site.weight("experts_gate_up"), site.weight("experts_down")
    shared_gate_up, shared_down = site.weight("shared_gate_up", Packed()), site.weight("shared_down")
    norm = router if apart else site.weight("norm")
    widest = max(op.intermediate, op.shared_intermediate)
    choosing = {"EXPERTS": op.experts, "E_BLOCK": next_power_of_2(op.experts), "K_BLOCK": next_power_of_2(op.top_k)}
    sizes = {"INTER": op.intermediate, "SHARED": op.shared_intermediate, "WIDEST": widest}
    both = {"TOP_K": op.top_k, "HIDDEN": op.hidden, "enable_fp_fusion": True}
    opening, middle, closing = (launched(set_[name]) for name in ("opening", "gate_up", "down"))
    counters = torch.zeros(site.settings["rows"], dtype=torch.int32, device=site.runtime.place)

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        rows, out, place = residual.shape[0], torch.empty_like(residual), residual.device
        if apart:
            x, after = apart(partial, residual)
            normed = x
        else:
            x, after, normed = residual, torch.empty_like(residual), torch.empty_like(residual)
        if not rows:
            return out, after
        logits = torch.empty((rows, op.experts + 1), dtype=torch.float32, device=place)
        ids = torch.empty((rows, op.top_k), dtype=torch.int32, device=place)
        weights = torch.empty((rows, op.top_k + 1), dtype=torch.float32, device=place)
        wide = torch.empty((rows, op.top_k + 1, widest), dtype=x.dtype, device=place)
        few_opening_kernel[(rows, cdiv(op.experts + 1, opening["BLOCK_N"]))](
            x, partial, norm, router, sigmoid, after, normed, logits, ids, weights, counters, op.eps,
            NORM=apart is None, **choosing, **both, **opening,
        )  # fmt: skip
        if not opening["CHOOSE"]:
            few_choose_kernel[(rows,)](logits, ids, weights, TOP_K=op.top_k, num_warps=1, **choosing)
        few_gate_up_kernel[(rows, op.top_k + 1, cdiv(widest, middle["BLOCK_N"]))](
            normed, ids, gate_up, shared_gate_up, wide, **sizes, **both, **middle
        )
        few_down_kernel[(rows, cdiv(op.hidden, closing["BLOCK_N"]))](
            wide, ids, weights, down, shared_down, out, **sizes, **both, **closing
        )
        return out, after

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
