// What the cores of a Gated DeltaNet layer share: bfloat16 activations, the state [V, K] in float32 (WIDE) or
// bfloat16, of which a block has PART rows and a lane moves EACH elements of one at once.
//
// The launcher defines K, V, SPLIT, WARPS, WIDE, ENCODE and ALIGNED: what a lane moves at once lies whole. A core
// defines EACH before it includes this.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int THREADS = 32 * WARPS;
constexpr int PART = V / SPLIT;                // rows of a block
constexpr int SIZE = WIDE ? 4 : 2;             // bytes of an element of the state
constexpr int ROW = K * SIZE;                  // of a row
constexpr int WORDS = EACH * SIZE / 4;  // 32-bit words that a lane moves at once
static_assert(PART * SPLIT == V && (WORDS == 1 || WORDS == 2 || WORDS == 4), "sizes");

__device__ __forceinline__ float wide(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u16 narrow(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// To 2^-21 and less where |x| is small: what it meets was bfloat16, or goes there.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

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

// An element of the output.
__device__ __forceinline__ void put(void* out, i64 at, float value, const float* scale, float limit) {
    if (ENCODE) {
        value = wide(narrow(value)) / *scale;
        value = value > limit ? limit : value < -limit ? -limit : value;
        u16 two;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(value));
        static_cast<unsigned char*>(out)[at] = two & 255;
    } else {
        static_cast<u16*>(out)[at] = narrow(value);
    }
}

__device__ __forceinline__ u32 shared(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// The rows of a block are brought to L2: they may still be written, so no more than that.
__device__ __forceinline__ void bring(const char* at) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(at), "n"(PART * ROW) : "memory");
}

__device__ __forceinline__ float log_decay(float a, float dt_bias, float a_log) {
    const float raised = a + dt_bias;
    return -expf(a_log) * (raised > 20.0f ? raised : log1pf(expf(raised)));
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The sum over the cluster of a number that each block has, put into its place ``parts[SPLIT]`` in each of them.
// The caller's threads have arrived at the cluster's barrier once before.
template <int COUNT>
__device__ __forceinline__ void across_cluster(float (&sums)[COUNT], float (*parts)[SPLIT], int part, int tid) {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all have begun: their memory may be written
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (tid < SPLIT) {
            u32 there;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared(&parts[i][part])), "r"(tid));
            asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(there), "f"(sums[i]) : "memory");
        }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        sums[i] = 0;
#pragma unroll
        for (int s = 0; s < SPLIT; s++) sums[i] += parts[i][s];
    }
}
