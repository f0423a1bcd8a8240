// A product with few rows, out [rows, N] = x [rows, K] . weight [N, K]^T, bounded by reading the weight once.
//
// A block takes TILE = 64 GROUPS rows of the weight. One thread asks for tiles of it (TMA), STAGES of them
// under way, the first before the wait for earlier kernels: none of these writes a weight. Each group of four
// warps multiplies its 64 rows of the weight with all of x (wgmma; the weight is the long side). SPLIT blocks,
// a cluster, share K and add up in shared memory, always in the same order. bfloat16, sums in float32.
//
// GATED: the weight is [gate; up], N of each, and out is silu(x gate^T) * (x up^T). A thread has both, for 8
// rows of gate and 8 of up lie one after the other in shared memory.
//
// The launcher defines N, K, WIDTH (rows of x in one instruction: 8, 16, 32, 64), CHUNKS of WIDTH, GROUPS,
// SPLIT, STAGES, BOXES (of 64 elements of K, in a stage), GATED and PDL.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) Map {
    u64 words[16];
};

struct Args {
    Map weight, x;
    u16* out;
    i64 out_row;
    int rows;
};

constexpr int ROW = 128;                       // bytes of a row of a box: 64 elements of K, what the swizzle spans
constexpr int TILE = 64 * GROUPS;
constexpr int ROWS = WIDTH * CHUNKS;           // of x
constexpr int COLUMNS = GATED ? TILE / 2 : TILE;  // of out, of this block
constexpr int WEIGHT = TILE * ROW, X = ROWS * ROW, STAGE = BOXES * (WEIGHT + X);  // bytes
constexpr int STEPS = (K + 64 * BOXES - 1) / (64 * BOXES);
constexpr int EACH = (STEPS + SPLIT - 1) / SPLIT;  // steps of a block
constexpr int CONSUMERS = 128 * GROUPS;
constexpr int PITCH = COLUMNS + 4;             // floats of a row of x in the exchange: rows start in other banks
static_assert(ROWS * PITCH * 4 <= STAGES * STAGE, "the exchange takes the place of the stages");
static_assert(EACH * (SPLIT - 1) < STEPS, "every block of a cluster has a share of K");
static_assert(!GATED || (SPLIT == 1 && N % 8 == 0), "gate and up meet before they are added up");

__device__ __forceinline__ u32 shared(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void await(u32 barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" :: "r"(barrier), "r"(parity) : "memory");
}

// A weight is read once a step, x by every block.
constexpr u64 FIRST = 0x12F0000000000000ull, LAST = 0x14F0000000000000ull;  // to leave L2

__device__ __forceinline__ void load(u32 to, const Map& map, int k, int row, u32 barrier, u64 keep) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        :: "r"(to), "l"(&map), "r"(k), "r"(row), "r"(barrier), "l"(keep) : "memory");
}

__device__ __forceinline__ void load_pairs(u32 to, const Map& map, int k, int block, u32 barrier, u64 keep) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;"
        :: "r"(to), "l"(&map), "r"(k), "r"(0), "r"(block), "r"(barrier), "l"(keep) : "memory");
}

// Rows of 128 bytes, swizzled by eights.
__device__ __forceinline__ u64 described(u32 at) {
    return u64((at & 0x3FFFF) >> 4) | u64(1) << 16 | u64(8 * ROW >> 4) << 32 | u64(1) << 62;
}

#define UPTO4 "%0,%1,%2,%3"
#define UPTO8 UPTO4 ",%4,%5,%6,%7"
#define UPTO16 UPTO8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define UPTO32 UPTO16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUM4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define SUM16(i) SUM4(i), SUM4(i + 4), SUM4(i + 8), SUM4(i + 12)
#define MULTIPLY(width, sums, a, b) \
    "wgmma.mma_async.sync.aligned.m64n" width "k16.f32.bf16.bf16 {" sums "}, " a ", " b ", 1, 1, 1, 0, 0;"

// sum += 64 rows of the weight times WIDTH rows of x, 16 elements of K.
__device__ __forceinline__ void multiply(float (&sum)[WIDTH / 2], u64 weight, u64 x) {
    if constexpr (WIDTH == 8)
        asm volatile(MULTIPLY("8", UPTO4, "%4", "%5") : SUM4(0) : "l"(weight), "l"(x));
    else if constexpr (WIDTH == 16)
        asm volatile(MULTIPLY("16", UPTO8, "%8", "%9") : SUM4(0), SUM4(4) : "l"(weight), "l"(x));
    else if constexpr (WIDTH == 32)
        asm volatile(MULTIPLY("32", UPTO16, "%16", "%17") : SUM16(0) : "l"(weight), "l"(x));
    else
        asm volatile(MULTIPLY("64", UPTO32, "%32", "%33") : SUM16(0), SUM16(16) : "l"(weight), "l"(x));
}

__device__ __forceinline__ u16 narrow(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) few_rows(const __grid_constant__ Args p) {
    extern __shared__ unsigned char raw[];
    __shared__ u64 full_[STAGES], empty_[STAGES];
    const u32 aligned = (shared(raw) + 1023) & ~1023, full = shared(full_), empty = shared(empty_);
    const int tid = threadIdx.x, part = blockIdx.x % SPLIT, first = blockIdx.x / SPLIT * COLUMNS;
    const int begin = part * EACH, steps = STEPS - begin < EACH ? STEPS - begin : EACH;
    float* exchange = reinterpret_cast<float*>(raw + (aligned - shared(raw)));
    if (tid == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * s) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + 8 * s), "n"(GROUPS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (tid >= CONSUMERS) {
        if (tid == CONSUMERS) {
            auto ask_weight = [&](int step) {
                const int s = step % STAGES;
                expect(full + 8 * s, STAGE);
#pragma unroll
                for (int b = 0; b < BOXES; b++) {
                    const int k = ((begin + step) * BOXES + b) * 64;
                    const u32 to = aligned + s * STAGE + b * WEIGHT;
                    if (GATED)
                        load_pairs(to, p.weight, k, first / 8, full + 8 * s, FIRST);
                    else
                        load(to, p.weight, k, first, full + 8 * s, FIRST);
                }
            };
            auto ask_x = [&](int step) {
                const int s = step % STAGES;
#pragma unroll
                for (int b = 0; b < BOXES; b++)
                    load(aligned + s * STAGE + BOXES * WEIGHT + b * X, p.x, ((begin + step) * BOXES + b) * 64, 0,
                         full + 8 * s, LAST);
            };
            const int ahead = steps < STAGES ? steps : STAGES;
            for (int step = 0; step < ahead; step++) ask_weight(step);
            if (PDL) {
                asm volatile("griddepcontrol.wait;" ::: "memory");
                asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
            }
            for (int step = 0; step < ahead; step++) ask_x(step);
            for (int step = ahead; step < steps; step++) {
                await(empty + 8 * (step % STAGES), (step / STAGES - 1) & 1);
                ask_weight(step);
                ask_x(step);
            }
        }
        __syncwarp();
    } else {
        const int group = tid / 128, warp = tid / 32, lane = tid % 32;
        float sums[CHUNKS][WIDTH / 2];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) sums[c][i] = 0;
        for (int step = 0; step < steps; step++) {
            const int s = step % STAGES;
            const u32 weight = aligned + s * STAGE + group * (64 * ROW), x = aligned + s * STAGE + BOXES * WEIGHT;
            await(full + 8 * s, step / STAGES & 1);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int b = 0; b < BOXES; b++)
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int c = 0; c < CHUNKS; c++)
                        multiply(sums[c], described(weight + b * WEIGHT + k * 32),
                                 described(x + b * X + c * (WIDTH * ROW) + k * 32));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (tid % 128 == 0) arrive(empty + 8 * s);
        }
        // all stages were read by all groups: their place is free
        asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");
        const int row = lane % 4 * 2, column = GATED ? warp * 8 + lane / 4 : warp * 16 + lane / 4;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i += 4) {
                float* at = exchange + (c * WIDTH + i * 2 + row) * PITCH + column;
                const float* sum = sums[c] + i;
                if (GATED) {
                    at[0] = silu(sum[0]) * sum[2], at[PITCH] = silu(sum[1]) * sum[3];
                } else {
                    at[0] = sum[0], at[PITCH] = sum[1], at[8] = sum[2], at[PITCH + 8] = sum[3];
                }
            }
        asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory");
    }
    if (SPLIT > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
    if (tid < CONSUMERS) {
        // a block of a cluster writes every SPLIT'th row of x
        const int rows = p.rows < ROWS ? p.rows : ROWS;
        for (int i = tid; ; i += CONSUMERS) {
            const int row = i / (COLUMNS / 2) * SPLIT + part, column = i % (COLUMNS / 2) * 2;
            if (row >= rows) break;
            float2 sum = {0, 0};
            const float* mine = exchange + row * PITCH + column;
            if (SPLIT > 1) {
#pragma unroll
                for (int s = 0; s < SPLIT; s++) {
                    u32 there;
                    float2 more;
                    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared(mine)), "r"(s));
                    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                                 : "=f"(more.x), "=f"(more.y) : "r"(there) : "memory");
                    sum.x += more.x, sum.y += more.y;
                }
            } else {
                sum = *reinterpret_cast<const float2*>(mine);
            }
            u16* out = p.out + row * p.out_row + first + column;
            if (N % 2 == 0 && first + column < N)
                *reinterpret_cast<u32*>(out) = narrow(sum.x) | u32(narrow(sum.y)) << 16;
            if (N % 2 && first + column < N) out[0] = narrow(sum.x);
            if (N % 2 && first + column + 1 < N) out[1] = narrow(sum.y);
        }
    }
    if (SPLIT > 1) {
        // a block's memory stays until the others have read it
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}
