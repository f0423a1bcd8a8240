"""Drafted tokens: launches of the verify core and of attention for a few rows of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.batch import Batch
from hal.kernel import Site
from hal.layout import Tail
from hal_triton.code.attention import LOG2_E, Out, attend, encoded, join
from hal_triton.code.gated_delta import Core
from hal_triton.code.parts import begin
from hal_triton.code.verify_core import verify_kernel
from hal_triton.needs import launched, next_power_of_2

Call = Callable[..., Any]


def verify(site: Site) -> Call:
    """At most SPLIT programs a sequence and value head, and no more in all than ``programs`` while one is left.

    Counters, where several share a head, belong to this binding.
    """
    core, op, settings, tail = Core(site), site.op, dict(site.settings), site.layouts["pending"]
    assert isinstance(tail, Tail)
    programs, place = settings.pop("programs", 0), site.runtime.place
    counters = torch.zeros(programs // 2, dtype=torch.int32, device=place)  # heads that can be split
    fixed = {**core.sizes, "TAIL": tail.length, "QUERIES": op.queries, **launched(settings)}

    def run(projected: tuple[Tensor, ...], state: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Any:
        out, pools = core.empty(projected), state
        heads, split = batch.sequences * op.value_heads, 1
        # a flush has no rows and any number of sequences
        while split < settings["SPLIT"] and 2 * split * heads <= programs:
            split *= 2
        if heads:
            work = torch.empty(
                (out.shape[0], op.value_heads, 2 * core.sizes["VP"]), dtype=torch.float32, device=place
            )  # fmt: skip
            verify_kernel[(heads * split,)](
                *projected, *(x.stride(0) for x in projected),
                batch.slots, batch.contexts, batch.accepted, batch.cu_seqlens, *pools, *(x.stride(0) for x in pools),
                core.weight, *core.small, out, core.scale, op.eps, core.limit, work, counters,
                **{**fixed, "SPLIT": split},
            )  # fmt: skip
        return core.result(out)

    return run


@triton.jit
def attention_verify_kernel(
    q_ptr, kv_ptr, slots_ptr, contexts_ptr, starts_ptr, table_ptr, mixed_ptr, tops_ptr, totals_ptr, scale,
    q_row, q_head, kv_page, kv_side, kv_cell, kv_head, table_row,
    gate_ptr, out_ptr, scale_ptr, limit, gate_row, gate_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, ALONE: tl.constexpr,
    ENCODE: tl.constexpr, GROUP_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head; split): ROWS rows by GROUP_BLOCK heads; sums, and ALONE, as for one row."""
    begin(PDL)
    sequence, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split, splits = tl.program_id(1), tl.num_programs(1)
    present = tl.load(slots_ptr + sequence) >= 0
    context = tl.load(contexts_ptr + sequence)
    first = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - first
    length = tl.where(present & (count > 0), context + count, 0)
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start, stop = split * share, tl.minimum((split + 1) * share, length)
    m, column = tl.arange(0, ROWS * GROUP_BLOCK), tl.arange(0, HEAD_DIM)
    token, member = m // GROUP_BLOCK, m % GROUP_BLOCK
    inside = (token < count) & (member < GROUP)
    row = (first + token).to(tl.int64)
    top = tl.full([ROWS * GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([ROWS * GROUP_BLOCK, HEAD_DIM], tl.float32)
    if start < stop:
        at = row * q_row + (head * GROUP + member) * q_head
        q = tl.load(q_ptr + at[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        kv_ptr += head.to(tl.int64) * kv_head
        table_ptr += sequence.to(tl.int64) * table_row
        # up to here every row sees every key
        whole = start + tl.maximum(tl.minimum(stop, context + 1) - start, 0) // BLOCK_N * BLOCK_N
        top, total, mixed = attend(
            q, top, total, mixed, kv_ptr, table_ptr, context + token, start, whole, scale, kv_page, kv_side, kv_cell,
            False, PAGE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
        top, total, mixed = attend(
            q, top, total, mixed, kv_ptr, table_ptr, context + token, whole, stop, scale, kv_page, kv_side, kv_cell,
            True, PAGE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
    if ALONE:
        gates = row * gate_row + (head * GROUP + member) * gate_head
        gate = tl.load(gate_ptr + gates[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        value = tl.where(present, mixed / tl.where(total > 0, total, 1.0)[:, None] * tl.sigmoid(gate), 0.0)
        value = encoded(value, scale_ptr, limit, gate_ptr.dtype.element_ty, ENCODE)
        place = (row * (KV_HEADS * GROUP) + head * GROUP + member) * HEAD_DIM
        tl.store(out_ptr + place[:, None] + column[None, :], value.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        partial = ((row * KV_HEADS + head) * splits + split) * GROUP + member
        tl.store(mixed_ptr + partial[:, None] * HEAD_DIM + column[None, :], mixed, mask=inside[:, None])
        tl.store(tops_ptr + partial, top, mask=inside)
        tl.store(totals_ptr + partial, total, mask=inside)


def attention(site: Site) -> Call:
    op, settings, result = site.op, dict(site.settings), Out(site)
    programs, most = settings.pop("programs"), settings.pop("most_splits")
    scale, joined = LOG2_E * op.head_dim**-0.5, join(op, settings["PDL"])

    def run(q: Tensor, gate: Tensor, state: tuple[Tensor], batch: Batch) -> Any:
        rows, (kv,), out = q.shape[0], state, result.empty(q)
        if not rows:
            return result.wrap(out)
        # of the sequences alone, never of lengths
        splits = max(1, min(most, next_power_of_2(programs // (batch.sequences * op.kv_heads))))
        partial = 0 if splits == 1 else rows
        mixed = torch.empty((partial, op.heads, splits, op.head_dim), dtype=torch.float32, device=q.device)
        tops, totals = torch.empty((2, partial, op.heads, splits), dtype=torch.float32, device=q.device)
        attention_verify_kernel[(batch.sequences * op.kv_heads, splits)](
            q, kv, batch.slots, batch.contexts, batch.cu_seqlens, batch.page_table, mixed, tops, totals, scale,
            q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
            batch.page_table.stride(0), gate, out, result.scale_or(gate), result.limit, gate.stride(0), gate.stride(1),
            KV_HEADS=op.kv_heads, GROUP=op.heads // op.kv_heads, PAGE=op.page_size, HEAD_DIM=op.head_dim,
            ALONE=splits == 1, ENCODE=result.encode, **launched(settings),
        )  # fmt: skip
        if splits > 1:
            joined(mixed, tops, totals, gate, out, result, splits)
        return result.wrap(out)

    return run
