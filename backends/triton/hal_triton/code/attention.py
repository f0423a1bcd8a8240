"""Attention over KV pages ``[pages, 2, page_size, kv_heads, head_dim]``, its output gate fused.

Scores are kept in powers of two. Page ids beyond a length, and cells of no token, are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.batch import Batch
from hal.formats import Encoded, Quantized
from hal.kernel import Site
from hal_triton.code.parts import begin
from hal_triton.needs import launched, next_power_of_2

Call = Callable[..., Any]
LOG2_E = 1.4426950408889634


@triton.jit
def attend(
    q, top, total, mixed, kv_ptr, table_ptr, position, start, stop, scale, kv_page, kv_side, kv_cell,
    MASKED: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys [start, stop) for q ``[M, HEAD_DIM]``; a row sees keys up to its ``position`` ``[M]``."""
    column = tl.arange(0, HEAD_DIM)
    for first in range(start, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        if MASKED:
            real = key < stop
            page = tl.load(table_ptr + key // PAGE, mask=real, other=0).to(tl.int64)
            at = page * kv_page + (key % PAGE) * kv_cell
            k = tl.load(kv_ptr + at[:, None] + column[None, :], mask=real[:, None], other=0.0)
            v = tl.load(kv_ptr + kv_side + at[:, None] + column[None, :], mask=real[:, None], other=0.0)
        else:
            page = tl.load(table_ptr + key // PAGE).to(tl.int64)
            at = page * kv_page + (key % PAGE) * kv_cell
            k = tl.load(kv_ptr + at[:, None] + column[None, :])
            v = tl.load(kv_ptr + kv_side + at[:, None] + column[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(real[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # a row that has seen no key yet, of a split that begins beyond it: its sums stay zero
        level = tl.where(higher > float("-inf"), higher, 0.0) if MASKED else higher
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        top = higher
    return top, total, mixed


@triton.jit
def encoded(value, scale_ptr, limit, like: tl.constexpr, ENCODE: tl.constexpr):
    """As rounded to ``like``, over the scale."""
    if ENCODE:
        value = value.to(like).to(tl.float32) / tl.load(scale_ptr)
        value = tl.minimum(tl.maximum(value, -limit), limit)
    return value


@triton.jit
def decode_kernel(
    q_ptr, kv_ptr, slots_ptr, lengths_ptr, table_ptr, mixed_ptr, tops_ptr, totals_ptr, scale,
    q_row, q_head, kv_page, kv_side, kv_cell, kv_head, table_row,
    gate_ptr, out_ptr, scale_ptr, limit, gate_row, gate_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, ALONE: tl.constexpr,
    ENCODE: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head; split): partial sums ``[rows, KV_HEADS, splits, GROUP, HEAD_DIM]``.

    ALONE: of one split the sums are whole, and go out times sigmoid(gate).
    """
    begin(PDL)
    row, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split, splits = tl.program_id(1), tl.num_programs(1)
    length = tl.where(tl.load(slots_ptr + row) < 0, 0, tl.load(lengths_ptr + row))
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start, stop = split * share, tl.minimum((split + 1) * share, length)
    member, column = tl.arange(0, GROUP_BLOCK), tl.arange(0, HEAD_DIM)
    inside = member < GROUP
    top = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    partial = (tl.program_id(0).to(tl.int64) * splits + split) * GROUP + member
    if ALONE:
        gates = row.to(tl.int64) * gate_row + (head * GROUP + member) * gate_head
        gate = tl.load(gate_ptr + gates[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        out_ptr += tl.program_id(0).to(tl.int64) * (GROUP * HEAD_DIM) + member[:, None] * HEAD_DIM + column[None, :]
        if start >= stop:
            zero = tl.zeros([GROUP_BLOCK, HEAD_DIM], tl.float32)
            tl.store(out_ptr, zero.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    if start < stop:
        at = row.to(tl.int64) * q_row + (head * GROUP + member) * q_head
        q = tl.load(q_ptr + at[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        mixed = tl.zeros([GROUP_BLOCK, HEAD_DIM], tl.float32)
        kv_ptr += head.to(tl.int64) * kv_head
        table_ptr += row.to(tl.int64) * table_row
        position = tl.full([GROUP_BLOCK], 0, tl.int32) + (length - 1)
        whole = start + (stop - start) // BLOCK_N * BLOCK_N
        top, total, mixed = attend(
            q, top, total, mixed, kv_ptr, table_ptr, position, start, whole, scale, kv_page, kv_side, kv_cell,
            False, PAGE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
        top, total, mixed = attend(
            q, top, total, mixed, kv_ptr, table_ptr, position, whole, stop, scale, kv_page, kv_side, kv_cell,
            True, PAGE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
        if ALONE:
            value = mixed / tl.where(total > 0, total, 1.0)[:, None] * tl.sigmoid(gate)
            value = encoded(value, scale_ptr, limit, gate_ptr.dtype.element_ty, ENCODE)
            tl.store(out_ptr, value.to(out_ptr.dtype.element_ty), mask=inside[:, None])
        else:
            tl.store(mixed_ptr + partial[:, None] * HEAD_DIM + column[None, :], mixed, mask=inside[:, None])
    if not ALONE:
        tl.store(tops_ptr + partial, top, mask=inside)
        tl.store(totals_ptr + partial, total, mask=inside)


@triton.jit
def join_kernel(
    mixed_ptr, tops_ptr, totals_ptr, gate_ptr, out_ptr, scale_ptr, limit, splits, gate_row, gate_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr, ENCODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, head; columns): the splits' sums weighed together, times sigmoid(gate)."""
    begin(PDL)
    row, head = tl.program_id(0).to(tl.int64) // (KV_HEADS * GROUP), tl.program_id(0) % (KV_HEADS * GROUP)
    split, column = tl.arange(0, SPLITS), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    partial = ((row * KV_HEADS + head // GROUP) * splits + split) * GROUP + head % GROUP
    totals = tl.load(totals_ptr + partial, mask=split < splits, other=0.0)
    tops = tl.load(tops_ptr + partial, mask=split < splits, other=float("-inf"))
    some = totals > 0
    weights = tl.where(some, tl.exp2(tops - tl.max(tl.where(some, tops, -1e30), 0)), 0.0)
    mixed = tl.load(mixed_ptr + partial[:, None] * HEAD_DIM + column[None, :], mask=some[:, None], other=0.0)
    total = tl.sum(weights * totals, 0)
    value = tl.sum(mixed * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    gate = tl.load(gate_ptr + row * gate_row + head * gate_head + column).to(tl.float32)
    value = tl.where(total > 0, value * tl.sigmoid(gate), 0.0)
    value = encoded(value, scale_ptr, limit, gate_ptr.dtype.element_ty, ENCODE)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * HEAD_DIM + column, value.to(out_ptr.dtype.element_ty))


@triton.jit
def prefill_kernel(
    q_ptr, gate_ptr, kv_ptr, tiles_ptr, slots_ptr, contexts_ptr, starts_ptr, table_ptr, out_ptr, scale_ptr, limit,
    scale, q_row, q_head, gate_row, gate_head, kv_page, kv_side, kv_cell, kv_head, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, ENCODE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_T tokens, KV head). tiles ``[tiles, 2]``: sequence, first token in it."""
    begin(PDL)
    sequence = tl.load(tiles_ptr + tl.program_id(0) * 2)
    at, head = tl.load(tiles_ptr + tl.program_id(0) * 2 + 1), tl.program_id(1)
    first = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - first
    context = tl.load(contexts_ptr + sequence)
    m, column = tl.arange(0, BLOCK_T * GROUP_BLOCK), tl.arange(0, HEAD_DIM)
    token, member = at + m // GROUP_BLOCK, m % GROUP_BLOCK
    inside = ((token < length) & (member < GROUP))[:, None]
    row, heads = (first + token).to(tl.int64), head * GROUP + member
    top = tl.full([BLOCK_T * GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T * GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK_T * GROUP_BLOCK, HEAD_DIM], tl.float32)
    present = tl.load(slots_ptr + sequence) >= 0
    if present:
        q = tl.load(q_ptr + (row * q_row + heads * q_head)[:, None] + column[None, :], mask=inside, other=0.0)
        stop = context + tl.minimum(at + BLOCK_T, length)
        # up to here every row of the tile sees every key
        whole = (context + at + 1) // BLOCK_N * BLOCK_N
        kv_ptr += head.to(tl.int64) * kv_head
        table_ptr += sequence.to(tl.int64) * table_row
        top, total, mixed = attend(
            q, top, total, mixed, kv_ptr, table_ptr, context + token, 0, whole, scale, kv_page, kv_side, kv_cell,
            False, PAGE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
        top, total, mixed = attend(
            q, top, total, mixed, kv_ptr, table_ptr, context + token, whole, stop, scale, kv_page, kv_side, kv_cell,
            True, PAGE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
    gate = tl.load(gate_ptr + (row * gate_row + heads * gate_head)[:, None] + column[None, :], mask=inside, other=0.0)
    value = mixed / tl.where(total > 0, total, 1.0)[:, None] * tl.sigmoid(gate.to(tl.float32))
    value = encoded(tl.where(present, value, 0.0), scale_ptr, limit, gate_ptr.dtype.element_ty, ENCODE)
    place = (row * (KV_HEADS * GROUP) + heads) * HEAD_DIM
    tl.store(out_ptr + place[:, None] + column[None, :], value.to(out_ptr.dtype.element_ty), mask=inside)


class Out:
    """Makes and wraps what an op gives, in its dtype or static fp8."""

    def __init__(self, site: Site) -> None:
        self.op, self.encode = site.op, isinstance(site.op.out, Quantized)
        self.kind = getattr(torch, site.op.out.value if self.encode else site.op.dtype)
        self.limit = site.op.out.limit if self.encode else 0.0
        self.scale: Tensor | None = site.scales["out"] if self.encode else None

    def empty(self, q: Tensor) -> Tensor:
        return torch.empty((q.shape[0], self.op.heads * self.op.head_dim), dtype=self.kind, device=q.device)

    def scale_or(self, other: Tensor) -> Tensor:
        """What a kernel is passed as scale: anything where nothing is encoded, for it is never read."""
        return other if self.scale is None else self.scale

    def wrap(self, out: Tensor) -> Tensor | Encoded:
        return out if self.scale is None else Encoded(out, self.scale)


def join(op: Any, pdl: bool) -> Callable[..., None]:
    """The launch that joins splits."""
    block_d = min(op.head_dim, 64)
    joining = launched({"num_warps": 4, "PDL": pdl})

    def run(mixed: Tensor, tops: Tensor, totals: Tensor, gate: Tensor, out: Tensor, result: Out, splits: int) -> None:
        join_kernel[(out.shape[0] * op.heads, op.head_dim // block_d)](
            mixed, tops, totals, gate, out, result.scale_or(gate), result.limit, splits,
            gate.stride(0), gate.stride(1), KV_HEADS=op.kv_heads, GROUP=op.heads // op.kv_heads, HEAD_DIM=op.head_dim,
            SPLITS=splits, BLOCK_D=block_d, ENCODE=result.encode, **joining,
        )  # fmt: skip

    return run


def decode(site: Site) -> Call:
    op, settings, result = site.op, dict(site.settings), Out(site)
    programs, most = settings.pop("programs"), settings.pop("most_splits")
    group, scale = op.heads // op.kv_heads, LOG2_E * op.head_dim**-0.5
    joined = join(op, settings["PDL"])

    def run(q: Tensor, gate: Tensor, state: tuple[Tensor], batch: Batch) -> Any:
        rows, (kv,), out = q.shape[0], state, result.empty(q)
        if not rows:
            return result.wrap(out)
        # of the rows alone, never of lengths
        splits = max(1, min(most, next_power_of_2(programs // (rows * op.kv_heads))))
        partial = 0 if splits == 1 else rows
        mixed = torch.empty((partial, op.heads, splits, op.head_dim), dtype=torch.float32, device=q.device)
        tops, totals = torch.empty((2, partial, op.heads, splits), dtype=torch.float32, device=q.device)
        decode_kernel[(rows * op.kv_heads, splits)](
            q, kv, batch.slots, batch.kv_lengths, batch.page_table, mixed, tops, totals, scale,
            q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
            batch.page_table.stride(0), gate, out, result.scale_or(gate), result.limit, gate.stride(0), gate.stride(1),
            KV_HEADS=op.kv_heads, GROUP=group, PAGE=op.page_size, HEAD_DIM=op.head_dim, ALONE=splits == 1,
            ENCODE=result.encode, **launched(settings),
        )  # fmt: skip
        if splits > 1:
            joined(mixed, tops, totals, gate, out, result, splits)
        return result.wrap(out)

    return run


@dataclass(frozen=True)
class Tiles:
    """Sequence and first token of each tile ``[tiles, 2]`` int32, the longest rows of keys first."""

    table: Tensor
    tokens: int


def tiles(block: int) -> Callable[[Batch], Tiles]:
    """The plan of a prefill step."""

    def plan(batch: Batch) -> Tiles:
        host = batch.host
        found = [(i, at) for i, length in enumerate(host.lengths) for at in range(0, length, block)]
        found.sort(key=lambda tile: -(host.contexts[tile[0]] + tile[1]))
        table = torch.tensor(found, dtype=torch.int32).reshape(-1, 2).to(batch.slots.device)
        return Tiles(table, host.tokens)

    return plan


def prefill(site: Site) -> Call:
    op, settings, result = site.op, dict(site.settings), Out(site)
    group, scale = op.heads // op.kv_heads, LOG2_E * op.head_dim**-0.5
    key = site.planned(tiles(settings["BLOCK_T"]))

    def run(q: Tensor, gate: Tensor, state: tuple[Tensor], batch: Batch) -> Any:
        (kv,), out = state, result.empty(q)
        plan: Tiles = batch.planned(key)
        if q.shape[0] > plan.tokens:
            out[plan.tokens :].zero_()
        if plan.table.shape[0]:
            prefill_kernel[(plan.table.shape[0], op.kv_heads)](
                q, gate, kv, plan.table, batch.slots, batch.contexts, batch.cu_seqlens, batch.page_table, out,
                result.scale_or(plan.table), result.limit, scale, q.stride(0), q.stride(1),
                gate.stride(0), gate.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
                batch.page_table.stride(0), KV_HEADS=op.kv_heads, GROUP=group, PAGE=op.page_size,
                HEAD_DIM=op.head_dim, ENCODE=result.encode, **launched(settings),
            )  # fmt: skip
        return result.wrap(out)

    return run
