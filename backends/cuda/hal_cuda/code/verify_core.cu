// The tokens of a verify step through a Gated DeltaNet core, in one launch.
//
// SPLIT blocks, a cluster, share a value head of a sequence; each takes its rows of the state [V, K], a warp
// ROWS of them at a time. A row is read once and written once: with the pending tokens applied, S <- exp(P) S +
// sum_j exp(P - P_j) e_j k_j^T, P their cumulated log decay. From that one S all tokens are computed, for with G
// the cumulated log decay of this step
//
//     e_t = beta_t (v_t - exp(G_t) S k_t - sum_{j<t} exp(G_t - G_j) (k_j.k_t) e_j)
//     o_t =               exp(G_t) S q_t + sum_{j<=t} exp(G_t - G_j) (k_j.q_t) e_j
//
// and k, e and log decay of each token go to its place in the pool of pending tokens. Cells that are written, of
// the convolution's ring and of that pool, are not those read, so blocks that share them never race.
//
// The launcher defines what ``core.cuh`` wants, KEY_HEADS, HEADS, RING, TAIL (places of that pool), QUERIES, AHEAD,
// EARLY, PDL and BLOCKS (how many run at once on a multiprocessor, at least).

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

constexpr int TOKENS = QUERIES <= 2 ? 2 : QUERIES <= 4 ? 4 : 8;  // sums of a row are 2 TOKENS, of which some may be idle
constexpr int AT_ONCE = 16 / TOKENS;                             // rows whose sums fill a warp
constexpr int LEFT = KEY_HEADS * K + HEADS * V + HEADS;          // numbers that a token leaves
constexpr int CHANNELS = 2 * K + PART;                           // q, k and v of a block
constexpr int MINE = (CHANNELS + THREADS - 1) / THREADS;         // of them, a thread's
constexpr int VALUES = (PART + THREADS - 1) / THREADS;
static_assert(ROWS % AT_ONCE == 0 && QUERIES <= 8, "sizes");

struct Shared {
    float q[QUERIES][K], k[QUERIES][K], old[QUERIES][K];           // old: keys of pending tokens
    float v[QUERIES][PART], e[QUERIES][PART], o[QUERIES][PART];
    alignas(16) float gone[PART][TOKENS];                          // errors of pending tokens, faded
    float gram[QUERIES][2 * QUERIES], squares[QUERIES];            // k_j with each k and q; q_t with itself
    float kk[QUERIES][QUERIES], qk[QUERIES][QUERIES];              // the same of unit vectors, faded; qk 0 above
    float logs[QUERIES], betas[QUERIES], faded[QUERIES], past[QUERIES];
    float sums[WARPS][QUERIES], parts[QUERIES][SPLIT];
};

__device__ __forceinline__ float dot(const float* x, const float* y, int lane) {
    float found = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) found += x[lane * EACH + i] * y[lane * EACH + i];
    return across_warp(found);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) verify_core(const __grid_constant__ Args p) {
    __shared__ Shared m;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid / 32;
    const int part = blockIdx.x % SPLIT, item = blockIdx.x / SPLIT, head = item % HEADS, first = part * PART;
    const int sequence = item / HEADS;
    const int slot = p.slots[sequence], start = p.starts[sequence], count = p.starts[sequence + 1] - start;
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    if (PDL) {
        if (EARLY && ALIGNED && tid == 0 && slot >= 0)
            bring(p.state + i64(slot) * p.state_slot * (WIDE ? 4 : 2) + (i64(head) * V + first) * ROW);
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    const int context = p.contexts[sequence], accepted = p.accepted[sequence];
    const i64 place = i64(start) * (HEADS * V) + head * V + first;
    if (slot < 0 || count + accepted == 0) {  // the whole cluster agrees
        for (int t = 0; t < count; t++)
            for (int c = tid; c < PART; c += THREADS) put(p.out, place + t * (HEADS * V) + c, 0.0f, p.scale, p.limit);
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
            if (context > accepted) {
                read(into[r], state + (i64(step) * WARPS * ROWS + r) * ROW);
            } else {
#pragma unroll
                for (int i = 0; i < WORDS; i++) into[r][i] = 0;
            }
        }
    };
    load(tile, 0);

    // what is pending: keys, errors, log decays
    float* pending = p.pending + i64(slot) * p.pending_slot;
    constexpr int GROUP = HEADS / KEY_HEADS, ERRORS = KEY_HEADS * K, DECAYS = LEFT - HEADS;
    const int key = head / GROUP * K;
    const bool lead = head % GROUP == 0 && part == 0;
    float errors[VALUES][QUERIES];
#pragma unroll
    for (int j = 0; j < QUERIES; j++) {
        const bool stands = j < accepted;
        const float* left = pending + (stands ? (context - accepted + j) % TAIL : 0) * i64(LEFT);
        for (int c = tid; c < K; c += THREADS) m.old[j][c] = stands ? left[key + c] : 0.0f;
#pragma unroll
        for (int i = 0, c = tid; i < VALUES; i++, c += THREADS)
            errors[i][j] = stands && c < PART ? left[ERRORS + head * V + first + c] : 0.0f;
        if (tid == j) m.past[j] = stands ? left[DECAYS + head] : 0.0f;
    }

    // the convolution of this block's channels; all that a thread reads is asked for before it writes
    const u16* x = p.qkv + start * p.qkv_row;
    u16* ring = p.ring + slot * p.ring_slot;
    auto channel_of = [&](int c) {
        return c < K ? key + c : c < 2 * K ? KEY_HEADS * K + key + c - K : 2 * KEY_HEADS * K + head * V + first + c - 2 * K;
    };
    u16 now[MINE][QUERIES], past[MINE][3];
    u64 taps[MINE];
#pragma unroll
    for (int i = 0, c = tid; i < MINE; i++, c += THREADS)
        if (c < CHANNELS) {
            const int channel = channel_of(c);
            taps[i] = reinterpret_cast<const u64*>(p.taps)[channel];
#pragma unroll
            for (int back = 1; back < 4; back++)
                past[i][back - 1] = context >= back ? ring[i64(channel) * RING + (context - back) % RING] : 0;
#pragma unroll
            for (int t = 0; t < QUERIES; t++) now[i][t] = t < count ? x[t * p.qkv_row + channel] : 0;
        }
    float zs[VALUES][QUERIES], norms[VALUES];
#pragma unroll
    for (int i = 0, c = tid; i < VALUES; i++, c += THREADS)
        if (c < PART) {
            norms[i] = wide(p.norm[first + c]);
#pragma unroll
            for (int t = 0; t < QUERIES; t++)
                zs[i][t] = t < count ? wide(p.z[(start + t) * p.z_row + head * V + first + c]) : 0.0f;
        }
    if (tid < QUERIES) {
        const bool real = tid < count;
        const i64 row = start + tid;
        m.logs[tid] = real ? log_decay(wide(p.a[row * p.a_row + head]), wide(p.dt_bias[head]), p.a_log[head]) : 0.0f;
        m.betas[tid] = real ? sigmoid(wide(p.b[row * p.b_row + head])) : 0.0f;
    }
#pragma unroll
    for (int i = 0, c = tid; i < MINE; i++, c += THREADS)
        if (c < CHANNELS) {
            float w[3] = {wide(past[i][2]), wide(past[i][1]), wide(past[i][0])};  // oldest first
#pragma unroll
            for (int t = 0; t < QUERIES; t++) {
                const float here = wide(now[i][t]);
                float total = here * wide(u16(taps[i] >> 48));
#pragma unroll
                for (int b = 0; b < 3; b++) total += w[b] * wide(u16(taps[i] >> (16 * b)));
                w[0] = w[1], w[1] = w[2], w[2] = here;
                total = silu(total);
                if (c < K) m.q[t][c] = total;
                else if (c < 2 * K) m.k[t][c - K] = total;
                else m.v[t][c - 2 * K] = total;
            }
        }
    __syncthreads();
#pragma unroll
    for (int i = 0, c = tid; i < MINE; i++, c += THREADS)
        if (c < CHANNELS && (lead || c >= 2 * K))
#pragma unroll
            for (int t = 0; t < QUERIES; t++)
                if (t < count) ring[i64(channel_of(c)) * RING + (context + t) % RING] = now[i][t];

    // products of this step's vectors with each other; how far what is pending has faded
    for (int pair = warp; pair < QUERIES * (2 * QUERIES + 1); pair += WARPS) {
        const int j = pair / (2 * QUERIES + 1), b = pair % (2 * QUERIES + 1), t = b % QUERIES;
        if (b == 2 * QUERIES) {
            const float found = dot(m.q[j], m.q[j], lane);
            if (lane == 0) m.squares[j] = found;
        } else if (t >= j) {
            const float found = dot(m.k[j], b < QUERIES ? m.k[t] : m.q[t], lane);
            if (lane == 0) m.gram[j][b] = found;
        }
    }
    float fade = 0;
    float fades[QUERIES];
#pragma unroll
    for (int j = QUERIES - 1; j >= 0; j--) fades[j] = expf(fade), fade += m.past[j];
    fade = expf(fade);
#pragma unroll
    for (int i = 0, c = tid; i < VALUES; i++, c += THREADS)
        if (c < PART)
#pragma unroll
            for (int j = 0; j < QUERIES; j++) m.gone[c][j] = errors[i][j] * fades[j];
    __syncthreads();
    const float root = rsqrtf(float(K));
    for (int entry = tid; entry < QUERIES * QUERIES; entry += THREADS) {
        const int t = entry / QUERIES, j = entry % QUERIES;
        float kk = 0, qk = 0;
        if (j <= t) {
            float since = 0;
            for (int i = j + 1; i <= t; i++) since += m.logs[i];
            const float unit = rsqrtf(m.gram[j][j] + 1e-6f) * expf(since);
            kk = m.gram[j][t] * unit * rsqrtf(m.gram[t][t] + 1e-6f);
            qk = m.gram[j][QUERIES + t] * unit * rsqrtf(m.squares[t] + 1e-6f) * root;
        }
        m.kk[t][j] = kk, m.qk[t][j] = qk;
        if (j == 0) {
            float total = 0;
            for (int i = 0; i <= t; i++) total += m.logs[i];
            m.faded[t] = expf(total);
        }
    }
    float q[QUERIES][EACH], k[QUERIES][EACH], old[QUERIES][EACH];
#pragma unroll
    for (int t = 0; t < QUERIES; t++) {
        const float unit_k = rsqrtf(m.gram[t][t] + 1e-6f), unit_q = rsqrtf(m.squares[t] + 1e-6f) * root;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            q[t][i] = m.q[t][lane * EACH + i] * unit_q;
            k[t][i] = m.k[t][lane * EACH + i] * unit_k;
            old[t][i] = m.old[t][lane * EACH + i];
        }
        if (lead && warp == t % WARPS && t < count) {
            float* left = pending + (context + t) % TAIL * i64(LEFT) + key;
#pragma unroll
            for (int i = 0; i < EACH; i++) left[lane * EACH + i] = k[t][i];
        }
        if (part == 0 && tid == t && t < count) pending[(context + t) % TAIL * i64(LEFT) + DECAYS + head] = m.logs[t];
    }
    __syncthreads();

    const int own_row = lane / (2 * TOKENS), own = lane % TOKENS;  // of each AT_ONCE rows, a lane's row and token
    const bool is_query = lane % (2 * TOKENS) >= TOKENS;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        if (AHEAD && step + 1 < STEPS) load(next, step + 1);
        const int at = (step * WARPS + warp) * ROWS;
#pragma unroll
        for (int group = 0; group < ROWS; group += AT_ONCE) {
            float found[32] = {};  // of idle tokens 0
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                float s[EACH];
                unpack(s, tile[group + r]);
#pragma unroll
                for (int i = 0; i < EACH; i++) s[i] *= fade;
#pragma unroll
                for (int j = 0; j < QUERIES; j++) {
                    const float e = m.gone[at + group + r][j];
#pragma unroll
                    for (int i = 0; i < EACH; i++) s[i] += e * old[j][i];
                }
                pack(tile[group + r], s);
#pragma unroll
                for (int t = 0; t < QUERIES; t++) {
                    float &by_k = found[r * 2 * TOKENS + t], &by_q = found[r * 2 * TOKENS + TOKENS + t];
#pragma unroll
                    for (int i = 0; i < EACH; i++) by_k += s[i] * k[t][i], by_q += s[i] * q[t][i];
                }
            }
            const float mine = across_warp(found, lane);
            const int row = at + group + own_row;
            float error[QUERIES], out = 0;
#pragma unroll
            for (int t = 0; t < QUERIES; t++) {
                float wanted = m.v[t][row] - m.faded[t] * __shfl_sync(~0u, mine, own_row * 2 * TOKENS + t);
#pragma unroll
                for (int j = 0; j < t; j++) wanted -= m.kk[t][j] * error[j];
                error[t] = wanted * m.betas[t];
            }
            if (own < QUERIES) {
                if (is_query) {
                    out = m.faded[own] * mine;
#pragma unroll
                    for (int j = 0; j < QUERIES; j++) out += m.qk[own][j] * error[j];
                    m.o[own][row] = out;
                } else {
#pragma unroll
                    for (int j = 0; j < QUERIES; j++)
                        if (j == own) out = error[j];
                    m.e[own][row] = out;
                }
            }
        }
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

    // the gated norm: its sums of squares are over the whole head
    __syncthreads();
    float square[QUERIES];
#pragma unroll
    for (int t = 0; t < QUERIES; t++) {
        square[t] = 0;
        for (int c = tid; c < PART; c += THREADS) square[t] += m.o[t][c] * m.o[t][c];
        square[t] = across_warp(square[t]);
        if (lane == 0) m.sums[warp][t] = square[t];
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < QUERIES; t++) {
        square[t] = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) square[t] += m.sums[w][t];
    }
    if (SPLIT > 1) across_cluster(square, m.parts, part, tid);
#pragma unroll
    for (int t = 0; t < QUERIES; t++)
        if (t < count) {
            const float unit = rsqrtf(square[t] / V + p.eps);
            float* left = pending + (context + t) % TAIL * i64(LEFT) + ERRORS + head * V + first;
#pragma unroll
            for (int i = 0, c = tid; i < VALUES; i++, c += THREADS)
                if (c < PART) {
                    left[c] = m.e[t][c];
                    put(p.out, place + t * (HEADS * V) + c, m.o[t][c] * unit * norms[i] * silu(zs[i][t]), p.scale, p.limit);
                }
        }
}
