"""One token through a Gated DeltaNet core, in one launch.

SPLIT programs share a value head; each takes its rows of the state in blocks of BV, and DEPTH blocks
are under way. State is read once and written once. Both reductions are over the old state S
``[V, K]``: with decay g, ``e = beta (v - g S k)``, ``o = g S q + e (k.q)``, ``S <- g S + e k^T``. The
ring cell that is written is not one of those read, so programs that share a channel never race.
Padding (negative slot) is a mask: everything read is 0, nothing but a row of zeros is written.
"""

# Triton grows tuples by addition, unpacks none
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from hal_triton.code.parts import begin, moved


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def cell(word, at, kind: tl.constexpr):
    """Element ``at`` of four 16-bit ones in a word, in float32."""
    return (word >> (at * 16).to(tl.int64)).to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def conv(
    x_ptr, weight_ptr, ring_ptr, channel, inside, context, writes,
    WIDTH: tl.constexpr, RING: tl.constexpr, WORDS: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Convolution and SiLU of some channels at position ``context``; ``writes``: keep the input.

    WORDS: the four taps, and the four cells of the ring, are one 64-bit word of each channel.
    ONCE: loads are volatile, so the compiler does not repeat them in the layout of the state's
    rows, where all lanes of a warp load the same (89 loads a thread instead of 24).
    """
    x = tl.load(x_ptr + channel, mask=inside, other=0.0, volatile=ONCE)
    if WORDS:
        kind = x_ptr.dtype.element_ty
        taps, cells = weight_ptr.to(tl.pointer_type(tl.int64)), ring_ptr.to(tl.pointer_type(tl.int64))
        taps = tl.load(taps + channel, mask=inside, other=0, volatile=ONCE)
        cells = tl.load(cells + channel, mask=inside & (context > 0), other=0, volatile=ONCE)
        total = x.to(tl.float32) * cell(taps, context * 0 + 3, kind)
        for back in tl.static_range(1, 4):
            past = tl.where(context >= back, cell(cells, (context - back) & 3, kind), 0.0)
            total += past * cell(taps, context * 0 + 3 - back, kind)
    else:
        last = weight_ptr + channel * WIDTH + WIDTH - 1
        total = x.to(tl.float32) * tl.load(last, mask=inside, other=0.0).to(tl.float32)
        for back in tl.static_range(1, WIDTH):
            past = ring_ptr + channel * RING + (context - back) % RING
            past = tl.load(past, mask=inside & (context >= back), other=0.0).to(tl.float32)
            total += past * tl.load(last - back, mask=inside, other=0.0).to(tl.float32)
    tl.store(ring_ptr + channel * RING + context % RING, x, mask=inside & writes)
    return silu(total)


@triton.jit
def gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, head, live):
    """Decay and beta of a head, as scalars in float32."""
    x = tl.load(a_ptr + head, mask=live, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
    step = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
    decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * step)
    return decay, tl.sigmoid(tl.load(b_ptr + head, mask=live, other=0.0).to(tl.float32))


@triton.jit
def delta_step(state, q, k, v, decay, beta, product):
    """State ``[BV, K]``, q and k ``[K]``, v ``[BV]``, product k.q: (o ``[BV]``, new state)."""
    error = beta * (v - decay * tl.sum(state * k[None, :], 1))
    out = decay * tl.sum(state * q[None, :], 1) + error * product
    return out, decay * state + error[:, None] * k[None, :]


@triton.jit
def block(state_ptr, tile, at, in_k, live, V: tl.constexpr, EVICT: tl.constexpr):
    """The rows ``at`` of a head's state, where they lie inside it."""
    return tl.load(state_ptr + tile, mask=(at < V)[:, None] & in_k & live, other=0.0, eviction_policy=EVICT)


@triton.jit
def finish(o, z, weight, live, out_ptr, at, inside, scale_ptr, eps, limit,
           V: tl.constexpr, KIND: tl.constexpr, ENCODE: tl.constexpr):  # fmt: skip
    """The gated norm of a head ``[V]``, in the format of the output."""
    value = tl.where(live, o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * weight * silu(z), 0.0)
    if ENCODE:
        value = value.to(KIND).to(tl.float32) / tl.load(scale_ptr)
        value = tl.minimum(tl.maximum(value, -limit), limit)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def decode_kernel(
    qkv_ptr, z_ptr, b_ptr, a_ptr, qkv_row, z_row, b_row, a_row,
    slots_ptr, contexts_ptr, ring_ptr, state_ptr, ring_slot, state_slot,
    weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, out_ptr, scale_ptr, eps, limit, work_ptr, counter_ptr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    VP: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, WORDS: tl.constexpr, ENCODE: tl.constexpr,
    SPLIT: tl.constexpr, BV: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
    ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid ``[rows * HEADS * SPLIT]``; ``work [rows, HEADS, 2, VP]`` holds a head's v and o."""
    PART: tl.constexpr = VP // SPLIT
    BLOCKS: tl.constexpr = PART // BV
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    item = tl.program_id(0) // SPLIT
    first = tl.program_id(0) % SPLIT * PART
    row, head = (item // HEADS).to(tl.int64), item % HEADS
    slot = tl.load(slots_ptr + row).to(tl.int64)
    context = tl.load(contexts_ptr + row)
    begin(PDL)
    live = slot >= 0
    held = live & (context > 0)
    key_head = head // GROUP

    # the state is asked for first: all else is small
    column = tl.arange(0, BK)
    in_k = (column < K)[None, :]
    at = tl.arange(0, BV)
    tile = at[:, None] * K + column[None, :]
    state_ptr += slot * state_slot + head * (V * K) + first * K
    ahead = ()
    for d in tl.static_range(DEPTH):
        ahead = ahead + (block(state_ptr + d * BV * K, tile, first + d * BV + at, in_k, held & (d < BLOCKS), V, EVICT),)

    x_ptr = qkv_ptr + row * qkv_row
    ring_ptr += slot * ring_slot
    channel = key_head * K + column
    lead = live & (head % GROUP == 0) & (first == 0)
    inside = (column < K) & live
    q = conv(x_ptr, weight_ptr, ring_ptr, channel, inside, context, lead, WIDTH, RING, WORDS, ONCE)
    channel += KEY_HEADS * K
    k = conv(x_ptr, weight_ptr, ring_ptr, channel, inside, context, lead, WIDTH, RING, WORDS, ONCE)
    channel = 2 * KEY_HEADS * K + head * V
    mine = first + tl.arange(0, PART)
    v = conv(
        x_ptr, weight_ptr, ring_ptr, channel + mine, (mine < V) & live, context, live, WIDTH, RING, WORDS, ONCE
    )  # fmt: skip
    decay, beta = gates(b_ptr + row * b_row, a_ptr + row * a_row, a_log_ptr, dt_bias_ptr, head, live)
    q, k = unit(q) * (K**-0.5), unit(k)
    product = tl.sum(q * k, 0)

    whole = tl.arange(0, VP)
    in_v = whole < V
    z = tl.load(z_ptr + row * z_row + head * V + whole, mask=in_v & live, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + whole, mask=in_v, other=0.0).to(tl.float32)
    KIND: tl.constexpr = qkv_ptr.dtype.element_ty
    place = row * (HEADS * V) + head * V + whole
    work_ptr += (row * HEADS + head) * (2 * VP)

    if BLOCKS == 1:
        if DEPTH == 0:
            ahead = (block(state_ptr, tile, mine, in_k, held, V, EVICT),)
        part, new = delta_step(ahead[0].to(tl.float32), q, k, v, decay, beta, product)
        mask = (mine < V)[:, None] & in_k & live
        tl.store(state_ptr + tile, new.to(state_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
        if SPLIT > 1:
            tl.store(work_ptr + VP + mine, part)
    else:
        # a block takes its v from memory: picking it out of registers costs more
        tl.store(work_ptr + mine, v)
        tl.debug_barrier()
        work_ptr += first
        for i in tl.range(BLOCKS, num_stages=STAGES):
            if DEPTH > 0:
                old = ahead[0]
                coming = block(
                    state_ptr + (i + DEPTH) * BV * K, tile, first + (i + DEPTH) * BV + at, in_k,
                    held & (i + DEPTH < BLOCKS), V, EVICT,
                )  # fmt: skip
                ahead = moved(ahead, coming, DEPTH)
            else:
                old = block(state_ptr + i * BV * K, tile, first + i * BV + at, in_k, held, V, EVICT)
            wanted = tl.load(work_ptr + i * BV + at)
            part, new = delta_step(old.to(tl.float32), q, k, wanted, decay, beta, product)
            mask = (first + i * BV + at < V)[:, None] & in_k & live
            new = new.to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + i * BV * K + tile, new, mask=mask, eviction_policy=EVICT)
            tl.store(work_ptr + VP + i * BV + at, part)
        work_ptr -= first

    if SPLIT > 1:
        # every thread's part of o lies before the count; the last to count sees all parts
        tl.debug_barrier()
        counter_ptr += row * HEADS + head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            o = tl.load(work_ptr + VP + whole, cache_modifier=".cg")
            finish(o, z, norm, live, out_ptr, place, in_v, scale_ptr, eps, limit, V, KIND, ENCODE)
            tl.store(counter_ptr, 0)
    elif BLOCKS > 1:
        tl.debug_barrier()
        o = tl.load(work_ptr + VP + whole, cache_modifier=".cg")
        finish(o, z, norm, live, out_ptr, place, in_v, scale_ptr, eps, limit, V, KIND, ENCODE)
    else:
        finish(part, z, norm, live, out_ptr, place, in_v, scale_ptr, eps, limit, V, KIND, ENCODE)
