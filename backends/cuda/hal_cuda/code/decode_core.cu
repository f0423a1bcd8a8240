// One token through a Gated DeltaNet core, in one launch.
//
// SPLIT blocks, a cluster, share a value head; each takes its rows of the state [V, K], a warp ROWS of
// them at a time. State is read once and written once. Both reductions are over the old state S: with
// decay g, e = beta (v - g S k), o = g S q + e (k.q), S <- g S + e k^T. The ring cell that is written is
// not one of those read, so blocks that share a channel never race. Padding (negative slot) writes
// nothing but a row of zeros. bfloat16 activations; the state is float32 (WIDE) or bfloat16.
//
// The launcher defines what ``core.cuh`` wants, KEY_HEADS, HEADS, RING, ROWS, AHEAD, EARLY, PDL and BLOCKS (how many
// run at once on a multiprocessor, at least). ALIGNED: a ring of four can be moved whole too.

constexpr int EACH = K / 32;

#include "core.cuh"

struct Args {
    const u16 *qkv, *z, *b, *a;
    i64 qkv_row, z_row, b_row, a_row;
    const int *slots, *contexts;
    u16* ring;
    char* state;
    i64 ring_slot, state_slot;
    const u16* taps;
    const float* a_log;
    const u16 *dt_bias, *norm;
    void* out;
    const float* scale;
    float eps, limit;
};

constexpr int SUMS = 2 * ROWS;
constexpr int STEPS = PART / (WARPS * ROWS);  // that a warp takes, ROWS at a time
static_assert(SUMS <= 32 && STEPS * WARPS * ROWS == PART, "sizes");

// Sums across the warp of SUMS values at once: half of them is given away at each step while there are
// several. Lane l ends with the sum of value l / (32 / SUMS).
template <int SUMS>
__device__ __forceinline__ float across_warp(float (&x)[SUMS], int lane) {
    int left = SUMS;
#pragma unroll
    for (int step = 16; step; step /= 2) {
        if (left > 1) {
            left /= 2;
            const bool high = lane & step;
#pragma unroll
            for (int i = 0; i < SUMS / 2; i++)
                if (i < left) {
                    const float given = high ? x[i] : x[i + left];
                    x[i] = (high ? x[i + left] : x[i]) + __shfl_xor_sync(~0u, given, step);
                }
        } else {
            x[0] += __shfl_xor_sync(~0u, x[0], step);
        }
    }
    return x[0];
}

// What the convolution of a channel reads. Its four taps, and a ring of four cells, are a word of 64 bits each.
// All that a thread reads is asked for before it writes: a store would hold back the loads that follow it.
constexpr bool WHOLE = RING == 4 && ALIGNED;

struct Channel {
    u64 taps, cells;
    u16 now, past[3];
};

__device__ __forceinline__ Channel take(const Args& p, const u16* x, const u16* ring, int channel, int context) {
    Channel c;
    c.taps = reinterpret_cast<const u64*>(p.taps)[channel];
    c.now = x[channel];
    ring += channel * RING;
    if (WHOLE) {
        c.cells = *reinterpret_cast<const u64*>(ring);
    } else {
#pragma unroll
        for (int back = 1; back < 4; back++) c.past[back - 1] = context >= back ? ring[(context - back) % RING] : 0;
    }
    return c;
}

// The convolution and SiLU. What lies before the sequence's start is none of its own.
__device__ __forceinline__ float convolved(const Channel& c, int context) {
    float total = wide(c.now) * wide(u16(c.taps >> 48));
#pragma unroll
    for (int back = 1; back < 4; back++) {
        const u16 past = WHOLE ? u16(c.cells >> (((context - back) & 3) * 16)) : c.past[back - 1];
        total += context >= back ? wide(past) * wide(u16(c.taps >> ((3 - back) * 16))) : 0.0f;
    }
    return silu(total);
}

// The word is written whole: parts of a sector cost memory more, and the cells that others read stay what they are.
__device__ __forceinline__ void keep(u16* ring, const Channel& c, int channel, int context) {
    ring += channel * RING;
    const int at = context % RING;
    if (WHOLE)
        *reinterpret_cast<u64*>(ring) = (c.cells & ~(u64(0xffff) << (at * 16))) | u64(c.now) << (at * 16);
    else
        ring[at] = c.now;
}

// ROWS rows of the state, one token on: both reductions are over the old rows. v and o are of these rows.
__device__ __forceinline__ void step_rows(
    u32 (&tile)[ROWS][WORDS], const float (&q)[EACH], const float (&k)[EACH], float decay, float beta, float product,
    const float* v, float* o, int lane) {
    float found[SUMS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float s[EACH];
        unpack(s, tile[r]);
        found[r] = found[ROWS + r] = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) found[r] += s[i] * k[i], found[ROWS + r] += s[i] * q[i];
    }
    // lanes below 16 have S k, the others S q, of one row each
    const float mine = across_warp(found, lane), other = __shfl_xor_sync(~0u, mine, 16);
    const int own = lane % 16 / (16 / ROWS);
    const float error = beta * (v[own] - decay * (lane < 16 ? mine : other));
    if (lane < 16 && lane % (16 / ROWS) == 0) o[own] = decay * other + error * product;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float e = __shfl_sync(~0u, error, r * (16 / ROWS));
        float s[EACH];
        unpack(s, tile[r]);
#pragma unroll
        for (int i = 0; i < EACH; i++) s[i] = decay * s[i] + e * k[i];
        pack(tile[r], s);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode_core(const __grid_constant__ Args p) {
    __shared__ float qs[K], ks[K], vs[PART], os[PART], sums[WARPS][3], squares[WARPS], parts[1][SPLIT];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid / 32;
    const int part = blockIdx.x % SPLIT, item = blockIdx.x / SPLIT, head = item % HEADS, first = part * PART;
    const i64 row = item / HEADS;
    const int slot = p.slots[row], context = p.contexts[row];
    const i64 place = row * (HEADS * V) + head * V + first;
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    if (PDL) {
        if (EARLY && ALIGNED && tid == 0 && slot >= 0)
            bring(p.state + i64(slot) * p.state_slot * SIZE + (i64(head) * V + first) * ROW);
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    if (slot < 0) {  // the whole cluster agrees
        for (int c = tid; c < PART; c += THREADS) put(p.out, place + c, 0.0f, p.scale, p.limit);
        if (SPLIT > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        return;
    }

    // the state is asked for first: all else is small
    char* state = p.state + i64(slot) * p.state_slot * SIZE + (i64(head) * V + first + warp * ROWS) * ROW
                + lane * (WORDS * 4);
    u32 tile[ROWS][WORDS], next[ROWS][WORDS];
    auto load = [&](u32 (&into)[ROWS][WORDS], int step) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (context > 0) {
                read(into[r], state + (i64(step) * WARPS * ROWS + r) * ROW);
            } else {
#pragma unroll
                for (int i = 0; i < WORDS; i++) into[r][i] = 0;
            }
        }
    };
    load(tile, 0);

    const u16* x = p.qkv + row * p.qkv_row;
    u16* ring = p.ring + slot * p.ring_slot;
    constexpr int GROUP = HEADS / KEY_HEADS;
    const int key = head / GROUP * K;
    const bool lead = head % GROUP == 0 && part == 0;
    constexpr int KEYS = (K + THREADS - 1) / THREADS, VALUES = (PART + THREADS - 1) / THREADS;  // channels of a thread
    const int v_first = 2 * KEY_HEADS * K + head * V + first, k_first = KEY_HEADS * K + key;
    Channel taken[2 * KEYS + VALUES];
    float zs[VALUES], norms[VALUES];
#pragma unroll
    for (int i = 0, c = tid; i < KEYS; i++, c += THREADS)
        if (c < K) {
            taken[2 * i] = take(p, x, ring, key + c, context);
            taken[2 * i + 1] = take(p, x, ring, k_first + c, context);
        }
#pragma unroll
    for (int i = 0, c = tid; i < VALUES; i++, c += THREADS)
        if (c < PART) {
            taken[2 * KEYS + i] = take(p, x, ring, v_first + c, context);
            zs[i] = wide(p.z[row * p.z_row + head * V + first + c]);
            norms[i] = wide(p.norm[first + c]);
        }
    const float decay = expf(log_decay(wide(p.a[row * p.a_row + head]), wide(p.dt_bias[head]), p.a_log[head]));
    const float beta = sigmoid(wide(p.b[row * p.b_row + head]));
    float square_q = 0, square_k = 0, product = 0;
#pragma unroll
    for (int i = 0, c = tid; i < KEYS; i++, c += THREADS)
        if (c < K) {
            const float q = convolved(taken[2 * i], context), k = convolved(taken[2 * i + 1], context);
            qs[c] = q, ks[c] = k;
            square_q += q * q, square_k += k * k, product += q * k;
        }
#pragma unroll
    for (int i = 0, c = tid; i < VALUES; i++, c += THREADS)
        if (c < PART) vs[c] = convolved(taken[2 * KEYS + i], context);
    square_q = across_warp(square_q), square_k = across_warp(square_k), product = across_warp(product);
    if (lane == 0) sums[warp][0] = square_q, sums[warp][1] = square_k, sums[warp][2] = product;
    __syncthreads();
#pragma unroll
    for (int i = 0, c = tid; i < KEYS; i++, c += THREADS)
        if (c < K && lead) {
            keep(ring, taken[2 * i], key + c, context);
            keep(ring, taken[2 * i + 1], k_first + c, context);
        }
#pragma unroll
    for (int i = 0, c = tid; i < VALUES; i++, c += THREADS)
        if (c < PART) keep(ring, taken[2 * KEYS + i], v_first + c, context);
    square_q = square_k = product = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) square_q += sums[w][0], square_k += sums[w][1], product += sums[w][2];
    const float unit_q = rsqrtf(square_q + 1e-6f) * rsqrtf(float(K)), unit_k = rsqrtf(square_k + 1e-6f);
    product *= unit_q * unit_k;
    float q[EACH], k[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) q[i] = qs[lane * EACH + i] * unit_q, k[i] = ks[lane * EACH + i] * unit_k;

#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        if (AHEAD && step + 1 < STEPS) load(next, step + 1);
        const int at = (step * WARPS + warp) * ROWS;
        step_rows(tile, q, k, decay, beta, product, vs + at, os + at, lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) write(state + (i64(step) * WARPS * ROWS + r) * ROW, tile[r]);
        if (step + 1 < STEPS) {
            if (AHEAD) {
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int i = 0; i < WORDS; i++) tile[r][i] = next[r][i];
            } else {
                load(tile, step + 1);
            }
        }
    }

    // the gated norm: its sum of squares is over the whole head
    __syncthreads();
    float square = 0;
    for (int c = tid; c < PART; c += THREADS) square += os[c] * os[c];
    square = across_warp(square);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    float whole[1] = {0};
#pragma unroll
    for (int w = 0; w < WARPS; w++) whole[0] += squares[w];
    if (SPLIT > 1) across_cluster(whole, parts, part, tid);
    const float unit = rsqrtf(whole[0] / V + p.eps);
#pragma unroll
    for (int i = 0, c = tid; i < VALUES; i++, c += THREADS)
        if (c < PART) put(p.out, place + c, os[c] * unit * norms[i] * silu(zs[i]), p.scale, p.limit);
}
