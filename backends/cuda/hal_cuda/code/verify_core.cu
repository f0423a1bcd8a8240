// The tokens of a verify step through a Gated DeltaNet core, in one launch.
//
// SPLIT blocks, a cluster, share a value head of a sequence; each takes its rows of the state [V, K], 16 of them a
// tile that ACROSS warps share. A row is read once and written once: with the pending tokens applied,
// S <- exp(P) S + sum_j exp(P - P_j) e_j k_j^T, P their cumulated log decay. From that one S all tokens are computed,
// for with G the cumulated log decay of this step
//
//     e_t = beta_t (v_t - exp(G_t) S k_t - sum_{j<t} exp(G_t - G_j) (k_j.k_t) e_j)
//     o_t =               exp(G_t) S q_t + sum_{j<=t} exp(G_t - G_j) (k_j.q_t) e_j
//
// and k, e and log decay of each token go to its place in the pool of pending tokens. Cells that are written, of
// the convolution's ring and of that pool, are not those read, so blocks that share them never race.
//
// A block asks for all its rows at once, and has them when its convolution is done. S k_t and S q_t are
// products of matrices: by matrix instructions of tf32, each factor as a sum of two, so that nothing of float32 but
// the last bit or two is lost; S itself is moved on in float32.
//
// The launcher defines what ``core.cuh`` wants, KEY_HEADS, HEADS, RING, TAIL (places of that pool), QUERIES, ACROSS,
// EARLY, PDL and BLOCKS (how many run at once on a multiprocessor, at least).

constexpr int EACH = 4;

#include "core.cuh"

struct Args {
    const u16 *qkv, *z, *b, *a;
    i64 qkv_row, z_row, b_row, a_row;
    const int *slots, *contexts, *accepted, *starts;
    u16* ring;
    char* state;
    float* pending;
    i64 ring_slot, state_slot, pending_slot;
    const u16* taps;
    const float* a_log;
    const u16 *dt_bias, *norm;
    void* out;
    const float* scale;
    float eps, limit;
};

constexpr int LEFT = KEY_HEADS * K + HEADS * V + HEADS;   // numbers that a token leaves
constexpr int CHANNELS = 2 * K + PART;                    // q, k and v of a block
constexpr int KEPT = (QUERIES * (K + PART) + THREADS - 1) / THREADS;  // of pending tokens' keys and errors, a thread's
constexpr int MINE = (CHANNELS + THREADS - 1) / THREADS;  // of those channels, a thread's
constexpr int TOKENS = QUERIES <= 4 ? 4 : 8;              // columns of keys, and as many of queries
constexpr int TILES = 2 * TOKENS / 8;                     // of eight columns
constexpr int SPAN = K / ACROSS;                          // columns of the state that a warp takes, 16 at a time
constexpr int FOUND = 2 * TOKENS + 4;                     // words of a row's sums, so that banks do not conflict
constexpr int LINE = (K > PART ? K : PART) + 16;          // of a vector, likewise
constexpr int TURNS = THREADS / PART;                     // threads of a row: each has every TURNS-th token
constexpr int OWN = (QUERIES + TURNS - 1) / TURNS;
static_assert(WARPS == PART / 16 * ACROSS && SPAN % 16 == 0 && PART % 32 == 0 && QUERIES <= 8, "sizes");

struct Shared {
    alignas(16) float vectors[3 * TOKENS][LINE];      // keys, queries, values of this step
    alignas(16) float old[QUERIES][K];                // keys of pending tokens
    alignas(16) float found[ACROSS][PART][FOUND];     // products of rows with all vectors
    float errors[QUERIES][PART];                      // of pending tokens
    float gram[QUERIES][2 * QUERIES], squares[QUERIES];  // k_j with each k and q; q_t with itself
    float kk[QUERIES][QUERIES], qk[QUERIES][QUERIES];    // the same of unit vectors, faded; qk 0 above
    float logs[QUERIES], betas[QUERIES], past[QUERIES];
    float by_k[QUERIES], by_q[QUERIES];               // what products with S are multiplied with
    float sums[PART / 32][QUERIES], parts[QUERIES][SPLIT];
};

// An address that is computed here, once: what is read relative to it then costs an addition.
template <class T>
__device__ __forceinline__ void keep(T*& at) { asm volatile("" : "+l"(at)); }

__device__ __forceinline__ float dot(const float* x, const float* y, int lane) {
    float found = 0;
#pragma unroll
    for (int i = 0; i < K; i += 32) found += x[lane + i] * y[lane + i];
    return across_warp(found);
}

// Of float32 the nearest tf32, and what is left.
__device__ __forceinline__ void split(float x, u32& high, u32& low) {
    high = (__float_as_uint(x) + 0x1000) & 0xffffe000;
    low = __float_as_uint(x - __uint_as_float(high));
}

// c [16, 8] += a [16, 8] b [8, 8]. Lane 4 g + i has of a columns i and i + 4 of rows g and g + 8, of b rows i and
// i + 4 of column g, of c columns 2 i and 2 i + 1 of rows g and g + 8.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) verify_core(const __grid_constant__ Args p) {
    __shared__ Shared m;
    const u32 tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const u32 part = blockIdx.x % SPLIT, first = part * PART;
    const u32 head = blockIdx.x / SPLIT % HEADS, sequence = blockIdx.x / (SPLIT * HEADS);
    const int slot = p.slots[sequence], start = p.starts[sequence], count = p.starts[sequence + 1] - start;
    const int context = p.contexts[sequence], accepted = p.accepted[sequence];
    char* state = p.state + i64(slot) * p.state_slot * SIZE + (i64(head) * V + first) * ROW;
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    if (PDL) {
        if (EARLY && ALIGNED && tid == 0 && slot >= 0) bring(state);
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    const i64 place = i64(start) * (HEADS * V) + head * V + first;
    if (slot < 0 || count + accepted == 0) {  // the whole cluster agrees
        for (int t = 0; t < count; t++)
            for (u32 c = tid; c < PART; c += THREADS) put(p.out, place + t * (HEADS * V) + c, 0.0f, p.scale, p.limit);
        if (SPLIT > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        return;
    }

    // All that a thread reads is asked for before it uses any of it or writes: first what is small and needed first.
    // Of pending tokens keys, errors and log decays.
    float* pending = p.pending + i64(slot) * p.pending_slot;
    keep(pending);
    constexpr int GROUP = HEADS / KEY_HEADS, ERRORS = KEY_HEADS * K, DECAYS = LEFT - HEADS;
    const int key = head / GROUP * K;
    const bool lead = head % GROUP == 0 && part == 0;
    auto newest = [&](int t) { return u32(context + t) % TAIL * LEFT; };
    auto oldest = [&](int j) { return u32(context - accepted + j) % TAIL * LEFT; };
    float kept[KEPT], past_log = 0;
#pragma unroll
    for (u32 i = 0, item = tid; i < KEPT; i++, item += THREADS) {
        const u32 j = item / (K + PART), c = item % (K + PART);
        const int at = c < K ? key + c : ERRORS + head * V + first + c - K;
        kept[i] = j < accepted ? pending[oldest(j) + at] : 0.0f;
    }
    if (tid < accepted) past_log = pending[oldest(tid) + DECAYS + head];
    // of the convolution's channels
    const u16* x = p.qkv + start * p.qkv_row;
    const int stride = p.qkv_row, spot = u32(context) % RING;
    u16* ring = p.ring + slot * p.ring_slot;
    keep(x), keep(ring);
    auto channel_of = [&](u32 c) {
        return c < K ? key + c : c < 2 * K ? KEY_HEADS * K + key + c - K : 2 * KEY_HEADS * K + head * V + first + c - 2 * K;
    };
    u16 now[MINE][QUERIES], past[MINE][3];
    u64 taps[MINE];
#pragma unroll
    for (u32 i = 0, c = tid; i < MINE; i++, c += THREADS)
        if (c < CHANNELS) {
            const int channel = channel_of(c);
            taps[i] = reinterpret_cast<const u64*>(p.taps)[channel];
#pragma unroll
            for (int back = 1; back < 4; back++)
                past[i][back - 1] = context >= back ? ring[channel * RING + spot - back + (spot < back ? RING : 0)] : 0;
#pragma unroll
            for (int t = 0; t < QUERIES; t++) now[i][t] = t < count ? x[t * stride + channel] : 0;
        }
    // of each token decay and beta; what is for the norm
    const bool real = tid < QUERIES && tid < count;
    const i64 token = start + tid;
    const u16 a = real ? p.a[token * p.a_row + head] : 0, b = real ? p.b[token * p.b_row + head] : 0;
    const float a_log = p.a_log[head];
    const u32 mine = tid % PART, turn = tid / PART;  // of the block's rows, and of the tokens
    const u16 dt_bias = p.dt_bias[head], norm = p.norm[first + mine];
    u16 zs[OWN];
#pragma unroll
    for (u32 i = 0, t = turn; i < OWN; i++, t += TURNS)
        zs[i] = t < count ? p.z[(start + t) * p.z_row + head * V + first + mine] : 0;
    // the state
    const u32 group = lane / 4, quad = lane % 4;
    const u32 row = warp / ACROSS * 16 + group, column = warp % ACROSS * SPAN + quad * 4;
    state += row * ROW + column * SIZE;
    keep(state);
    auto cell = [&](int piece, int lower) { return state + lower * (8 * ROW) + piece * (16 * SIZE); };
    u32 tile[SPAN / 16][2][WORDS];
#pragma unroll
    for (int piece = 0; piece < SPAN / 16; piece++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++)
            if (context > accepted) {
                read(tile[piece][lower], cell(piece, lower));
            } else {
#pragma unroll
                for (int i = 0; i < WORDS; i++) tile[piece][lower][i] = 0;
            }

#pragma unroll
    for (u32 i = 0, item = tid; i < KEPT; i++, item += THREADS) {
        const u32 j = item / (K + PART), c = item % (K + PART);
        if (j < QUERIES) (c < K ? m.old[j][c] : m.errors[j][c - K]) = kept[i];
    }
    if (tid < QUERIES) {
        m.past[tid] = past_log;
        m.logs[tid] = real ? log_decay(wide(a), wide(dt_bias), a_log) : 0.0f;
        m.betas[tid] = real ? sigmoid(wide(b)) : 0.0f;
    }
#pragma unroll
    for (u32 i = 0, c = tid; i < MINE; i++, c += THREADS)
        if (c < CHANNELS) {
            float* to = c < K       ? &m.vectors[TOKENS][c]
                        : c < 2 * K ? &m.vectors[0][c - K]
                                    : &m.vectors[2 * TOKENS][c - 2 * K];
            float w[3] = {wide(past[i][2]), wide(past[i][1]), wide(past[i][0])};  // oldest first
#pragma unroll
            for (int t = 0; t < QUERIES; t++) {
                const float here = wide(now[i][t]);
                float total = here * wide(u16(taps[i] >> 48));
#pragma unroll
                for (int tap = 0; tap < 3; tap++) total += w[tap] * wide(u16(taps[i] >> (16 * tap)));
                w[0] = w[1], w[1] = w[2], w[2] = here;
                to[t * LINE] = silu(total);
            }
        }
    if (QUERIES < TOKENS)
        for (u32 i = tid; i < 2 * (TOKENS - QUERIES) * K; i += THREADS) {
            const u32 idle = i / K;
            m.vectors[idle % 2 * TOKENS + QUERIES + idle / 2][i % K] = 0.0f;
        }
    __syncthreads();
    int spots[QUERIES];
#pragma unroll
    for (int t = 0; t < QUERIES; t++) spots[t] = spot + t - (spot + t < RING ? 0 : RING);
#pragma unroll
    for (u32 i = 0, c = tid; i < MINE; i++, c += THREADS)
        if (c < CHANNELS && (lead || c >= 2 * K)) {
            u16* cells = ring + channel_of(c) * RING;
#pragma unroll
            for (int t = 0; t < QUERIES; t++)
                if (t < count) cells[spots[t]] = now[i][t];
        }

    // products of this step's vectors with each other
    for (u32 pair = warp; pair < QUERIES * (2 * QUERIES + 1); pair += WARPS) {
        const u32 j = pair / (2 * QUERIES + 1), with = pair % (2 * QUERIES + 1), t = with % QUERIES;
        if (with == 2 * QUERIES) {
            const float found = dot(m.vectors[TOKENS + j], m.vectors[TOKENS + j], lane);
            if (lane == 0) m.squares[j] = found;
        } else if (t >= j) {
            const float found = dot(m.vectors[j], m.vectors[with < QUERIES ? t : TOKENS + t], lane);
            if (lane == 0) m.gram[j][with] = found;
        }
    }

    // the pending tokens applied, then all products with this step's vectors
    float fade = 0, gone[2][QUERIES];
#pragma unroll
    for (int j = QUERIES - 1; j >= 0; j--) {
        const float faded = expf(fade);
        gone[0][j] = m.errors[j][row] * faded, gone[1][j] = m.errors[j][row + 8] * faded;
        fade += m.past[j];
    }
    fade = expf(fade);
    float sums[TILES][2][4] = {};  // of the larger halves, and of what was left
#pragma unroll
    for (int piece = 0; piece < SPAN / 16; piece++) {
        const int at = column + piece * 16;
        float s[2][EACH];
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            unpack(s[lower], tile[piece][lower]);
#pragma unroll
            for (int i = 0; i < EACH; i++) s[lower][i] *= fade;
        }
#pragma unroll
        for (int j = 0; j < QUERIES; j++) {
            const float4 k = *reinterpret_cast<const float4*>(&m.old[j][at]);
#pragma unroll
            for (int lower = 0; lower < 2; lower++) {
                const float e = gone[lower][j];
                s[lower][0] += e * k.x, s[lower][1] += e * k.y, s[lower][2] += e * k.z, s[lower][3] += e * k.w;
            }
        }
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            pack(tile[piece][lower], s[lower]);
            write(cell(piece, lower), tile[piece][lower]);
        }
        u32 high[2][4], low[2][4];  // of the state, two of its columns at a time
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int two = 0; two < 2; two++) split(s[i % 2][2 * two + i / 2], high[two][i], low[two][i]);
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const float4 four = *reinterpret_cast<const float4*>(&m.vectors[n * 8 + group][at]);
            const float all[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int two = 0; two < 2; two++) {
                u32 high0, low0, high1, low1;
                split(all[2 * two], high0, low0), split(all[2 * two + 1], high1, low1);
                multiply(sums[n][0], high[two], high0, high1);
                multiply(sums[n][1], low[two], high0, high1);
                multiply(sums[n][1], high[two], low0, low1);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            m.found[warp % ACROSS][row + i / 2 * 8][n * 8 + quad * 2 + i % 2] = sums[n][0][i] + sums[n][1][i];
    __syncthreads();
    const float root = rsqrtf(float(K));
    for (u32 entry = tid; entry < QUERIES * QUERIES; entry += THREADS) {
        const u32 t = entry / QUERIES, j = entry % QUERIES;
        float since = 0, total = 0;
#pragma unroll
        for (u32 i = 0; i < QUERIES; i++) {
            const float log = m.logs[i];
            since += i > j && i <= t ? log : 0.0f, total += i <= t ? log : 0.0f;
        }
        const float unit_k = rsqrtf(m.gram[t][t] + 1e-6f), unit_q = rsqrtf(m.squares[t] + 1e-6f) * root;
        const float unit = rsqrtf(m.gram[j][j] + 1e-6f) * expf(since), faded = expf(total);
        m.kk[t][j] = j <= t ? m.gram[j][t] * unit * unit_k : 0.0f;
        m.qk[t][j] = j <= t ? m.gram[j][QUERIES + t] * unit * unit_q : 0.0f;
        if (j == 0) m.by_k[t] = unit_k * faded, m.by_q[t] = unit_q * faded;
    }
    if (lead)
#pragma unroll
        for (u32 item = tid; item < QUERIES * K; item += THREADS) {
            const u32 t = item / K, c = item % K;
            if (t < count) pending[newest(t) + key + c] = m.vectors[t][c] * rsqrtf(m.gram[t][t] + 1e-6f);
        }
    if (part == 0 && real) pending[newest(tid) + DECAYS + head] = m.logs[tid];
    __syncthreads();

    // a row's errors and outputs; every thread of a row has its errors, and of the tokens its own
    float products[2 * TOKENS] = {}, error[QUERIES], o[OWN];
#pragma unroll
    for (int share = 0; share < ACROSS; share++)
#pragma unroll
        for (int i = 0; i < 2 * TOKENS; i += 4) {
            const float4 some = *reinterpret_cast<const float4*>(&m.found[share][mine][i]);
            products[i] += some.x, products[i + 1] += some.y, products[i + 2] += some.z, products[i + 3] += some.w;
        }
#pragma unroll
    for (int t = 0; t < QUERIES; t++) {
        float wanted = m.vectors[2 * TOKENS + t][mine] - m.by_k[t] * products[t];
#pragma unroll
        for (int j = 0; j < t; j++) wanted -= m.kk[t][j] * error[j];
        error[t] = wanted * m.betas[t];
    }
#pragma unroll
    for (int t = 0; t < QUERIES; t++)
        if (t % TURNS == turn) {
            float out = m.by_q[t] * products[TOKENS + t];
#pragma unroll
            for (int j = 0; j < QUERIES; j++) out += m.qk[t][j] * error[j];
            o[t / TURNS] = out;
            if (t < count) pending[newest(t) + ERRORS + head * V + first + mine] = error[t];
            const float square = across_warp(out * out);
            if (lane == 0) m.sums[mine / 32][t] = square;
        }
    __syncthreads();

    // the gated norm: its sums of squares are over the whole head
    float square[QUERIES];
#pragma unroll
    for (int t = 0; t < QUERIES; t++) {
        square[t] = 0;
#pragma unroll
        for (int w = 0; w < PART / 32; w++) square[t] += m.sums[w][t];
    }
    if (SPLIT > 1) across_cluster(square, m.parts, part, tid);
#pragma unroll
    for (int t = 0; t < QUERIES; t++)
        if (t % TURNS == turn && t < count) {
            const float unit = rsqrtf(square[t] / V + p.eps);
            const float gate = silu(wide(zs[t / TURNS]));
            put(p.out, place + t * (HEADS * V) + mine, o[t / TURNS] * unit * wide(norm) * gate, p.scale, p.limit);
        }
}
