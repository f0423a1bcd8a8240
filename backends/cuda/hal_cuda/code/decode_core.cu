// One token through a Gated DeltaNet core, in one launch.
//
// SPLIT blocks, a cluster, share a value head; each takes its rows of the state [V, K], a warp ROWS of
// them at a time. State is read once and written once. Both reductions are over the old state S: with
// decay g, e = beta (v - g S k), o = g S q + e (k.q), S <- g S + e k^T. The ring cell that is written is
// not one of those read, so blocks that share a channel never race. Padding (negative slot) writes
// nothing but a row of zeros. bfloat16 activations; the state is float32 (WIDE) or bfloat16.
//
// The launcher defines KEY_HEADS, HEADS, K, V, RING, SPLIT, WARPS, ROWS, AHEAD, EARLY, WIDE, ENCODE, PDL,
// BLOCKS (how many run at once on a multiprocessor, at least) and ALIGNED: a lane's part of a row of the
// state, and a ring of four, can be moved whole.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

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

constexpr int THREADS = 32 * WARPS;
constexpr int PART = V / SPLIT;                // rows of a block
constexpr int ROW = K * (WIDE ? 4 : 2);        // bytes of a row
constexpr int STEPS = PART / (WARPS * ROWS);   // that a warp takes, ROWS at a time
constexpr int EACH = K / 32;                   // elements of a row that a lane holds
constexpr int WORDS = EACH * (WIDE ? 4 : 2) / 4;  // 32-bit words of a row that a lane holds
constexpr int SUMS = 2 * ROWS;
static_assert(PART % (WARPS * ROWS) == 0 && SUMS <= 32 && (WORDS == 1 || WORDS == 2 || WORDS == 4), "sizes");

__device__ __forceinline__ float wide(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u16 narrow(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ __forceinline__ float across_warp(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// A word of the state wherever it lies: float32 is one, bfloat16 two elements.
__device__ __forceinline__ u32 one_word(const char* at) {
    if (WIDE) return *reinterpret_cast<const u32*>(at);
    const u16* two = reinterpret_cast<const u16*>(at);
    return two[0] | u32(two[1]) << 16;
}

__device__ __forceinline__ void one_word(char* at, u32 word) {
    if (WIDE) {
        *reinterpret_cast<u32*>(at) = word;
    } else {
        u16* two = reinterpret_cast<u16*>(at);
        two[0] = word & 0xffff, two[1] = word >> 16;
    }
}

// A lane's part of one row. Plain on purpose: stores that take no place in L1, or leave L2 first, cost 5 %.
__device__ __forceinline__ void read(u32 (&row)[WORDS], const char* at) {
    if constexpr (!ALIGNED)
        for (int i = 0; i < WORDS; i++) row[i] = one_word(at + 4 * i);
    else if constexpr (WORDS == 4)
        asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(row[0]), "=r"(row[1]), "=r"(row[2]), "=r"(row[3]) : "l"(at));
    else if constexpr (WORDS == 2)
        asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(row[0]), "=r"(row[1]) : "l"(at));
    else
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(row[0]) : "l"(at));
}

__device__ __forceinline__ void write(char* at, const u32 (&row)[WORDS]) {
    if constexpr (!ALIGNED)
        for (int i = 0; i < WORDS; i++) one_word(at + 4 * i, row[i]);
    else if constexpr (WORDS == 4)
        asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};"
                     :: "l"(at), "r"(row[0]), "r"(row[1]), "r"(row[2]), "r"(row[3]) : "memory");
    else if constexpr (WORDS == 2)
        asm volatile("st.global.v2.b32 [%0], {%1,%2};" :: "l"(at), "r"(row[0]), "r"(row[1]) : "memory");
    else
        asm volatile("st.global.b32 [%0], %1;" :: "l"(at), "r"(row[0]) : "memory");
}

__device__ __forceinline__ void unpack(float (&x)[EACH], const u32 (&row)[WORDS]) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
        x[i] = WIDE ? __uint_as_float(row[i]) : i % 2 ? __uint_as_float(row[i / 2] & 0xffff0000u) : wide(row[i / 2]);
}

__device__ __forceinline__ void pack(u32 (&row)[WORDS], const float (&x)[EACH]) {
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        if (WIDE)
            row[i] = __float_as_uint(x[i]);
        else
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(row[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
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

// Sums across the warp of SUMS values at once: half of them is given away at each step while there are
// several. Lane l ends with the sum of value l / (32 / SUMS).
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

__device__ __forceinline__ void put(const Args& p, i64 at, float value) {
    if (ENCODE) {
        value = wide(narrow(value)) / *p.scale;
        value = value > p.limit ? p.limit : value < -p.limit ? -p.limit : value;
        u16 two;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(value));
        static_cast<unsigned char*>(p.out)[at] = two & 255;
    } else {
        static_cast<u16*>(p.out)[at] = narrow(value);
    }
}

__device__ __forceinline__ u32 shared(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ float decay_of(float a, float dt_bias, float a_log) {
    const float raised = a + dt_bias;
    return expf(-expf(a_log) * (raised > 20.0f ? raised : log1pf(expf(raised))));
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

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
    __shared__ float qs[K], ks[K], vs[PART], os[PART], sums[WARPS][3], squares[WARPS], parts[SPLIT];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid / 32;
    const int part = blockIdx.x % SPLIT, item = blockIdx.x / SPLIT, head = item % HEADS, first = part * PART;
    const i64 row = item / HEADS;
    const int slot = p.slots[row], context = p.contexts[row];
    const i64 place = row * (HEADS * V) + head * V + first;
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    if (PDL) {
        // the state may still be written: it is brought near, no more
        if (EARLY && ALIGNED && tid == 0 && slot >= 0) {
            const char* at = p.state + i64(slot) * p.state_slot * (WIDE ? 4 : 2) + (i64(head) * V + first) * ROW;
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(at), "n"(PART * ROW) : "memory");
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    if (slot < 0) {  // the whole cluster agrees
        for (int c = tid; c < PART; c += THREADS) put(p, place + c, 0.0f);
        if (SPLIT > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        return;
    }

    // the state is asked for first: all else is small
    char* state = p.state + i64(slot) * p.state_slot * (WIDE ? 4 : 2) + (i64(head) * V + first + warp * ROWS) * ROW
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
    const float decay = decay_of(wide(p.a[row * p.a_row + head]), wide(p.dt_bias[head]), p.a_log[head]);
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
    square = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) square += squares[w];
    if (SPLIT > 1) {
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all have begun: their memory may be written
        if (tid < SPLIT) {
            u32 there;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared(&parts[part])), "r"(tid));
            asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(there), "f"(square) : "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        square = 0;
#pragma unroll
        for (int s = 0; s < SPLIT; s++) square += parts[s];
    }
    const float unit = rsqrtf(square / V + p.eps);
#pragma unroll
    for (int i = 0, c = tid; i < VALUES; i++, c += THREADS)
        if (c < PART) put(p, place + c, os[c] * unit * norms[i] * silu(zs[i]));
}
