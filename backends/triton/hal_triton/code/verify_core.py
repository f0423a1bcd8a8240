"""The tokens of a verify step through a Gated DeltaNet core, in one launch.

SPLIT programs share a value head of a sequence; each takes its rows of the state in blocks of BV. A
block is read once and written once: with the pending tokens applied, ``S <- exp(P) S + sum_j exp(P - P_j)
e_j k_j^T``, P their cumulated log decay. From that one S all rows are computed, for with G the cumulated
log decay of this step

    e_t = beta_t (v_t - exp(G_t) S k_t - sum_{j<t} exp(G_t - G_j) (k_j.k_t) e_j)
    o_t =               exp(G_t) S q_t + sum_{j<=t} exp(G_t - G_j) (k_j.q_t) e_j

and k, e and log decay of each row go to its place in the pool of pending tokens. Cells that are written,
of the convolution's ring and of that pool, are not those read, so programs that share them never race.

A tile of the state is ``[SIDE, K / 4, rows / SIDE, 4]``: the compiler lays SIDE rows beside each other over the
lanes of a wave, so a sum over K passes fewer lanes, and one exchange serves them all; each lane then holds SIDE
times as much of every vector over K, which are ``[K / 4, 4]``.
"""

# Triton grows tuples by addition, unpacks none
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from hal_triton.code.decode_core import finish, silu
from hal_triton.code.parts import begin, moved


@triton.jit
def mixed(x_ptr, x_row, weight_ptr, ring_ptr, channel, inside, context, count, writes,
          WIDTH: tl.constexpr, RING: tl.constexpr, QUERIES: tl.constexpr):  # fmt: skip
    """Convolution and SiLU of some channels, a tensor for each row; ``writes``: keep the inputs."""
    taps, window, found = (), (), ()
    for i in tl.static_range(WIDTH):
        taps = taps + (tl.load(weight_ptr + channel * WIDTH + i, mask=inside, other=0.0).to(tl.float32),)
    for i in tl.static_range(WIDTH - 1):
        position = context - (WIDTH - 1) + i
        past = ring_ptr + channel * RING + tl.maximum(position, 0) % RING
        window = window + (tl.load(past, mask=inside & (position >= 0), other=0.0).to(tl.float32),)
    for t in tl.static_range(QUERIES):
        x = tl.load(x_ptr + t * x_row + channel, mask=inside & (t < count), other=0.0)
        tl.store(ring_ptr + channel * RING + (context + t) % RING, x, mask=inside & (t < count) & writes)
        x = x.to(tl.float32)
        total = x * taps[WIDTH - 1]
        for i in tl.static_range(WIDTH - 1):
            total += window[i] * taps[i]
        window = moved(window, x, WIDTH - 1)
        found = found + (silu(total),)
    return found


@triton.jit
def unit(x):
    return x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) + 1e-6)


@triton.jit
def dot(x, y):
    return tl.sum(tl.sum(x * y, 1), 0)


@triton.jit
def against(state, x):
    """State ``[SIDE, C, R, E]`` times a vector ``[C, E]``: ``[SIDE, R]``."""
    return tl.sum(tl.sum(state * x[None, :, None, :], 3), 1)


@triton.jit
def coming(
    state_ptr, tile, error_ptr, here, oldest, accepted, held, in_k,
    V: tl.constexpr, K: tl.constexpr, QUERIES: tl.constexpr, TAIL: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """A block of the state, and of the errors of each pending token: the rows ``here``, where they lie in the head."""
    mask = ((here < V) & held)[:, None, :, None] & in_k[None, :, None, :]
    found = (tl.load(state_ptr + tile, mask=mask, other=0.0),)
    for j in tl.static_range(QUERIES):
        error = error_ptr + tl.maximum(oldest + j, 0) % TAIL * LEFT + here
        found = found + (tl.load(error, mask=(here < V) & (j < accepted), other=0.0),)
    return found


@triton.jit
def finish_rows(
    work_ptr, z_ptr, z_row, norm_ptr, out_ptr, scale_ptr, row, head, count, live, eps, limit,
    HEADS: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, QUERIES: tl.constexpr, KIND: tl.constexpr,
    ENCODE: tl.constexpr,
):  # fmt: skip
    """The gated norm of a head for each row."""
    at = tl.arange(0, VP)
    norm = tl.load(norm_ptr + at, mask=at < V, other=0.0).to(tl.float32)
    for t in tl.static_range(QUERIES):
        inside = (at < V) & (t < count)
        o = tl.load(work_ptr + t * (HEADS * 2 * VP) + VP + at, mask=inside, other=0.0, cache_modifier=".cg")
        z = tl.load(z_ptr + (row + t) * z_row + head * V + at, mask=inside & live, other=0.0).to(tl.float32)
        place = (row + t) * (HEADS * V) + head * V + at
        finish(o, z, norm, live, out_ptr, place, inside, scale_ptr, eps, limit, V, KIND, ENCODE)


@triton.jit
def verify_kernel(
    qkv_ptr, z_ptr, b_ptr, a_ptr, qkv_row, z_row, b_row, a_row,
    slots_ptr, contexts_ptr, accepted_ptr, starts_ptr, ring_ptr, state_ptr, pending_ptr,
    ring_slot, state_slot, pending_slot,
    weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, out_ptr, scale_ptr, eps, limit, work_ptr, counter_ptr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    VP: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, TAIL: tl.constexpr, QUERIES: tl.constexpr,
    ENCODE: tl.constexpr, SPLIT: tl.constexpr, BV: tl.constexpr, SIDE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid ``[sequences * HEADS * SPLIT]``; ``work [rows, HEADS, 2, VP]`` holds v and o of each row."""
    PART: tl.constexpr = VP // SPLIT
    BLOCKS: tl.constexpr = PART // BV
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    LEFT: tl.constexpr = KEY_HEADS * K + HEADS * V + HEADS
    E: tl.constexpr = 4
    item = tl.program_id(0) // SPLIT
    first = tl.program_id(0) % SPLIT * PART
    sequence, head = item // HEADS, item % HEADS
    begin(PDL)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    context = tl.load(contexts_ptr + sequence)
    accepted = tl.load(accepted_ptr + sequence)
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    count = (tl.load(starts_ptr + sequence + 1) - row).to(tl.int32)
    live = (slot >= 0) & (count + accepted > 0)
    held = live & (context > accepted)
    key_head = head // GROUP

    # vectors over K; the places of a block of the state
    column = tl.arange(0, BK // E)[:, None] * E + tl.arange(0, E)[None, :]
    in_k = column < K
    at = tl.arange(0, SIDE)[:, None] + tl.arange(0, BV // SIDE)[None, :] * SIDE
    tile = at[:, None, :, None] * K + column[None, :, None, :]
    state_ptr += slot * state_slot + head * (V * K) + first * K
    pending_ptr += slot * pending_slot
    error_ptr = pending_ptr + KEY_HEADS * K + head * V
    oldest = context - accepted
    standing = tl.where(live, accepted, 0)
    # the state is asked for first: all else is small
    old = coming(state_ptr, tile, error_ptr, first + at, oldest, standing, held, in_k, V, K, QUERIES, TAIL, LEFT)

    # what is pending: keys, and how far each has faded when the last is applied
    keys, decays, fades = (), (), ()
    whole = 0.0
    for j in tl.static_range(QUERIES):
        stands = j < standing
        left = pending_ptr + tl.maximum(oldest + j, 0) % TAIL * LEFT
        keys = keys + (tl.load(left + key_head * K + column, mask=stands & in_k, other=0.0),)
        decays = decays + (tl.load(left + (LEFT - HEADS) + head, mask=stands, other=0.0),)
        whole += decays[j]
    since = 0.0
    for j in tl.static_range(QUERIES):
        since += decays[j]
        fades = fades + (tl.exp(whole - since),)
    fade = tl.exp(whole)

    x_ptr = qkv_ptr + row * qkv_row
    ring_ptr += slot * ring_slot
    lead = live & (head % GROUP == 0) & (first == 0)
    inside = in_k & live
    # a block takes its v from memory: picking it out of registers costs more
    work_ptr += (row * HEADS + head) * (2 * VP)
    mine = first + tl.arange(0, PART)
    channel = 2 * KEY_HEADS * K + head * V + mine
    v = mixed(
        x_ptr, qkv_row, weight_ptr, ring_ptr, channel, (mine < V) & live, context, count, live, WIDTH, RING, QUERIES
    )  # fmt: skip
    for t in tl.static_range(QUERIES):
        tl.store(work_ptr + t * (HEADS * 2 * VP) + mine, v[t], mask=(mine < VP) & (t < count))
    channel = key_head * K + column
    q = mixed(x_ptr, qkv_row, weight_ptr, ring_ptr, channel, inside, context, count, lead, WIDTH, RING, QUERIES)
    channel += KEY_HEADS * K
    k = mixed(x_ptr, qkv_row, weight_ptr, ring_ptr, channel, inside, context, count, lead, WIDTH, RING, QUERIES)

    # gates, unit vectors, products of this step's rows with each other
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    qs, ks, betas, totals, kk, qk = (), (), (), (), (), ()
    total = 0.0
    for t in tl.static_range(QUERIES):
        real = live & (t < count)
        x = tl.load(a_ptr + (row + t) * a_row + head, mask=real, other=0.0).to(tl.float32) + bias
        log_decay = rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
        total += log_decay
        totals = totals + (total,)
        betas = betas + (tl.sigmoid(tl.load(b_ptr + (row + t) * b_row + head, mask=real, other=0.0).to(tl.float32)),)
        qs = qs + (unit(q[t]) * (K**-0.5),)
        ks = ks + (unit(k[t]),)
        left = pending_ptr + (context + t) % TAIL * LEFT
        tl.store(left + key_head * K + column, ks[t], mask=in_k & real & lead)
        tl.store(left + (LEFT - HEADS) + head, log_decay, mask=real & (first == 0))
        for j in tl.static_range(t):
            decay = tl.exp(totals[t] - totals[j])
            kk = kk + (decay * dot(ks[j], ks[t]),)
            qk = qk + (decay * dot(ks[j], qs[t]),)
        qk = qk + (dot(ks[t], qs[t]),)
    tl.debug_barrier()

    for i in tl.range(BLOCKS, num_stages=STAGES):
        here = first + i * BV + at
        block, more = old, i + 1 < BLOCKS
        old = coming(
            state_ptr + (i + 1) * (BV * K), tile, error_ptr, here + BV, oldest, tl.where(more, standing, 0),
            held & more, in_k, V, K, QUERIES, TAIL, LEFT,
        )  # fmt: skip
        mask = ((here < V) & live)[:, None, :, None] & in_k[None, :, None, :]
        state = block[0].to(tl.float32) * fade
        for j in tl.static_range(QUERIES):
            state += (block[1 + j] * fades[j])[:, None, :, None] * keys[j][None, :, None, :]
        tl.store(state_ptr + i * (BV * K) + tile, state.to(state_ptr.dtype.element_ty), mask=mask)
        errors = ()
        for t in tl.static_range(QUERIES):
            wanted = work_ptr + t * (HEADS * 2 * VP) + here
            decay = tl.exp(totals[t])
            error = tl.load(wanted, mask=(t < count) & live, other=0.0) - decay * against(state, ks[t])
            out = decay * against(state, qs[t])
            for j in tl.static_range(t):
                error -= kk[t * (t - 1) // 2 + j] * errors[j]
                out += qk[t * (t + 1) // 2 + j] * errors[j]
            error *= betas[t]
            errors = errors + (error,)
            out += qk[t * (t + 1) // 2 + t] * error
            left = pending_ptr + (context + t) % TAIL * LEFT
            tl.store(left + KEY_HEADS * K + head * V + here, error, mask=(here < V) & live & (t < count))
            tl.store(wanted + VP, out, mask=t < count)

    tl.debug_barrier()
    if SPLIT > 1:
        # every thread's part of o lies before the count; the last to count sees all parts
        counter_ptr += sequence * HEADS + head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            finish_rows(work_ptr, z_ptr, z_row, norm_ptr, out_ptr, scale_ptr, row, head, count, live, eps, limit,
                        HEADS, V, VP, QUERIES, qkv_ptr.dtype.element_ty, ENCODE)  # fmt: skip
            tl.store(counter_ptr, 0)
    else:
        finish_rows(work_ptr, z_ptr, z_row, norm_ptr, out_ptr, scale_ptr, row, head, count, live, eps, limit,
                    HEADS, V, VP, QUERIES, qkv_ptr.dtype.element_ty, ENCODE)  # fmt: skip
