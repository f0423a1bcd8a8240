"""One token through a Gated DeltaNet core: the device code of both arrangements.

State is read once and written once. Both reductions are over the old state S ``[V, K]``:
with decay g, ``e = beta (v - g S k)``, ``o = g S q + e (k.q)``, ``S <- g S + e k^T``. The ring cell
that is written is not one of those read, so programs that share a channel never race.
Padding (negative slot) is a mask: everything read is 0, nothing but a row of zeros is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
def finish(o, z, weight, live, out_ptr, at, inside, scale_ptr, eps, limit,
           V: tl.constexpr, KIND: tl.constexpr, ENCODE: tl.constexpr):  # fmt: skip
    """The gated norm of a head, whose values lie ``[blocks, BV]``, in the format of the output."""
    mean = tl.sum(tl.sum(o * o, 1), 0) / V
    value = tl.where(live, o * tl.rsqrt(mean + eps) * weight * silu(z), 0.0)
    if ENCODE:
        value = value.to(KIND).to(tl.float32) / tl.load(scale_ptr)
        value = tl.minimum(tl.maximum(value, -limit), limit)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def head_step(
    row, head, qkv_ptr, z_ptr, b_ptr, a_ptr, qkv_row, z_row, b_row, a_row,
    slots_ptr, contexts_ptr, ring_ptr, state_ptr, ring_slot, state_slot,
    weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, out_ptr, scale_ptr, eps, limit, work_ptr, counter_ptr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VP: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, WORDS: tl.constexpr,
    ENCODE: tl.constexpr, SPLIT: tl.constexpr, EVICT: tl.constexpr, ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One value head of one row: all of V in blocks, or, SPLIT, the block of this program."""
    BLOCKS: tl.constexpr = VP // BV
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if PDL:
        gdc_wait()
    context = tl.load(contexts_ptr + row)
    first = tl.program_id(0) if SPLIT else 0
    row = row.to(tl.int64)
    live = slot >= 0
    held = live & (context > 0)
    key_head = head // GROUP

    # the state's block is asked for first: all else is small
    column = tl.arange(0, BK)
    in_k = column < K
    v_at = first * BV + tl.arange(0, BV)
    state_ptr += slot * state_slot + head * (V * K)
    tile = v_at[:, None] * K + column[None, :]
    in_tile = (v_at < V)[:, None] & in_k[None, :]
    state = tl.load(state_ptr + tile, mask=in_tile & held, other=0.0, eviction_policy=EVICT)

    x_ptr = qkv_ptr + row * qkv_row
    ring_ptr += slot * ring_slot
    channel = key_head * K + column
    lead = live & (head % GROUP == 0) & (first == 0)
    q = conv(x_ptr, weight_ptr, ring_ptr, channel, in_k & live, context, lead, WIDTH, RING, WORDS, ONCE)
    channel += KEY_HEADS * K
    k = conv(x_ptr, weight_ptr, ring_ptr, channel, in_k & live, context, lead, WIDTH, RING, WORDS, ONCE)
    decay, beta = gates(b_ptr + row * b_row, a_ptr + row * a_row, a_log_ptr, dt_bias_ptr, head, live)
    q, k = unit(q) * (K**-0.5), unit(k)
    product = tl.sum(q * k, 0)

    block = tl.arange(0, BLOCKS)
    whole = block[:, None] * BV + tl.arange(0, BV)[None, :]
    in_v = whole < V
    z = tl.load(z_ptr + row * z_row + head * V + whole, mask=in_v & live, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + whole, mask=in_v, other=0.0).to(tl.float32)
    KIND: tl.constexpr = qkv_ptr.dtype.element_ty
    at = row * (HEADS * V) + head * V + whole
    v_channel = 2 * KEY_HEADS * K + head * V

    if SPLIT:
        v = conv(
            x_ptr, weight_ptr, ring_ptr, v_channel + v_at, (v_at < V) & live, context, live, WIDTH, RING, WORDS, ONCE
        )
        out, new = delta_step(state.to(tl.float32), q, k, v, decay, beta, product)
        work_ptr += (row * HEADS + head) * VP
        tl.store(work_ptr + v_at, out)
        tl.store(state_ptr + tile, new.to(state_ptr.dtype.element_ty), mask=in_tile & live, eviction_policy=EVICT)
        # every thread's part of o lies before the count; the last to count sees all parts
        tl.debug_barrier()
        counter_ptr += row * HEADS + head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == BLOCKS - 1:
            o = tl.load(work_ptr + whole, cache_modifier=".cg")
            finish(o, z, norm, live, out_ptr, at, in_v, scale_ptr, eps, limit, V, KIND, ENCODE)
            tl.store(counter_ptr, 0)
    else:
        o = tl.zeros((BLOCKS, BV), tl.float32)
        for i in tl.static_range(BLOCKS):
            old = state
            if i + 1 < BLOCKS:  # ask for the next block before this one's work
                state = tl.load(
                    state_ptr + (i + 1) * BV * K + tile,
                    mask=(v_at < V - (i + 1) * BV)[:, None] & in_k[None, :] & held,
                    other=0.0,
                    eviction_policy=EVICT,
                )
            inside = v_at < V - i * BV
            channel = v_channel + i * BV + v_at
            v = conv(x_ptr, weight_ptr, ring_ptr, channel, inside & live, context, live, WIDTH, RING, WORDS, ONCE)
            out, new = delta_step(old.to(tl.float32), q, k, v, decay, beta, product)
            new = new.to(state_ptr.dtype.element_ty)
            mask = inside[:, None] & in_k[None, :] & live
            tl.store(state_ptr + i * BV * K + tile, new, mask=mask, eviction_policy=EVICT)
            o = tl.where(block[:, None] == i, out[None, :], o)
        finish(o, z, norm, live, out_ptr, at, in_v, scale_ptr, eps, limit, V, KIND, ENCODE)
    if PDL:
        gdc_launch_dependents()


@triton.jit
def decode_kernel(
    qkv_ptr, z_ptr, b_ptr, a_ptr, qkv_row, z_row, b_row, a_row,
    slots_ptr, contexts_ptr, ring_ptr, state_ptr, ring_slot, state_slot,
    weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, out_ptr, scale_ptr, eps, limit, items,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VP: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, WORDS: tl.constexpr,
    ENCODE: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program a row and value head; PERSISTENT: each takes every so many-th of them."""
    if PERSISTENT:
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=STAGES):
            head_step(
                item // HEADS, item % HEADS, qkv_ptr, z_ptr, b_ptr, a_ptr, qkv_row, z_row, b_row, a_row,
                slots_ptr, contexts_ptr, ring_ptr, state_ptr, ring_slot, state_slot,
                weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, out_ptr, scale_ptr, eps, limit, out_ptr, out_ptr,
                KEY_HEADS, HEADS, K, V, BK, BV, VP, WIDTH, RING, WORDS, ENCODE, False, EVICT, ONCE, PDL,
            )  # fmt: skip
    else:
        item = tl.program_id(0)
        head_step(
            item // HEADS, item % HEADS, qkv_ptr, z_ptr, b_ptr, a_ptr, qkv_row, z_row, b_row, a_row,
            slots_ptr, contexts_ptr, ring_ptr, state_ptr, ring_slot, state_slot,
            weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, out_ptr, scale_ptr, eps, limit, out_ptr, out_ptr,
            KEY_HEADS, HEADS, K, V, BK, BV, VP, WIDTH, RING, WORDS, ENCODE, False, EVICT, ONCE, PDL,
        )  # fmt: skip


@triton.jit
def split_kernel(
    qkv_ptr, z_ptr, b_ptr, a_ptr, qkv_row, z_row, b_row, a_row,
    slots_ptr, contexts_ptr, ring_ptr, state_ptr, ring_slot, state_slot,
    weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, out_ptr, scale_ptr, eps, limit, work_ptr, counter_ptr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VP: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, WORDS: tl.constexpr,
    ENCODE: tl.constexpr, EVICT: tl.constexpr, ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program a block of V, on a grid [blocks, value heads, rows]; the last of a head finishes it."""
    head_step(
        tl.program_id(2), tl.program_id(1), qkv_ptr, z_ptr, b_ptr, a_ptr, qkv_row, z_row, b_row, a_row,
        slots_ptr, contexts_ptr, ring_ptr, state_ptr, ring_slot, state_slot,
        weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, out_ptr, scale_ptr, eps, limit, work_ptr, counter_ptr,
        KEY_HEADS, HEADS, K, V, BK, BV, VP, WIDTH, RING, WORDS, ENCODE, True, EVICT, ONCE, PDL,
    )  # fmt: skip
