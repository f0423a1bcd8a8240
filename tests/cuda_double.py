"""CUDA C++ of the cuda backend on a CPU: the threads of a block take turns at each barrier, blocks follow one another.

What a file says in PTX is replaced: conversions by the host's, fences and prefetches by nothing. Clusters and bulk
copies are not doubled, so launches of one block a head only, whose state may lie anywhere (``ALIGNED`` 0).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from hal_cuda.code import nvrtc

SHIM = r"""
#include <cmath>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
struct Dim { int x; };
struct float4 { float x, y, z, w; };
static Dim threadIdx, blockIdx;
static float exchanged[WARPS][32];
// a thread that waits hands on to its neighbour; whoever comes last lets all go
struct Thread { jmp_buf here; ucontext_t begun; bool runs, ended; char stack[1 << 16]; };
static Thread threads[32 * WARPS];
static ucontext_t outside;
static void others() {
    const int self = threadIdx.x;
    if (_setjmp(threads[self].here)) return;
    for (int next = (self + 1) % (32 * WARPS);; next = (next + 1) % (32 * WARPS)) {
        if (threads[next].ended) {
            if (next == self) setcontext(&outside);
            continue;
        }
        threadIdx.x = next;
        if (threads[next].runs) _longjmp(threads[next].here, 1);
        threads[next].runs = true;
        setcontext(&threads[next].begun);
    }
}
struct Barrier {
    int size = 32, came = 0, round = 0;
    void wait() {
        const int mine = round;
        if (++came == size) came = 0, round++;
        for (int turns = 0; mine == round; others())
            if (++turns > 1000) std::abort();  // some thread never comes
    }
};
static Barrier of_block{32 * WARPS}, of_warp[WARPS];
template <class To, class From> static To bits(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
#define __expf(x) std::exp(float(x))
static float __fdividef(float x, float y) { return y > 0x1p126f ? 0.0f : x / y; }
static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static unsigned short rounded(float x) {
    const unsigned u = bits<unsigned>(x);
    return std::isnan(x) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static unsigned short e4m3(float x) {
    const float size = std::fabs(x);
    if (std::isnan(x)) return 0x7f;
    int exponent = -6;
    if (size >= std::ldexp(1.0f, -6)) std::frexp(size, &exponent), exponent--;
    int steps = int(std::nearbyint(std::ldexp(size, 3 - exponent)));
    if (steps == 16) steps = 8, exponent++;
    const int code = steps < 8 ? steps : (exponent + 7) * 8 + steps - 8;
    return (std::signbit(x) ? 0x80 : 0) | (code > 0x7e ? 0x7e : code);
}
static void __syncthreads() { of_block.wait(); }
static float __shfl_sync(unsigned, float x, int from) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    exchanged[warp][lane] = x;
    of_warp[warp].wait();
    const float found = exchanged[warp][from % 32];
    of_warp[warp].wait();
    return found;
}
static unsigned factors[WARPS][32][6];
static void product(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {  // m16n8k8 of tf32
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto all = factors[warp];
    for (int i = 0; i < 6; i++) all[lane][i] = (i < 4 ? a[i] : i < 5 ? b0 : b1) & 0xffffe000;
    of_warp[warp].wait();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = c[i];
        for (int k = 0; k < 8; k++)
            sum += double(bits<float>(all[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]))
                 * bits<float>(all[column * 4 + k % 4][4 + k / 4]);
        c[i] = sum;
    }
    of_warp[warp].wait();
}
static float __shfl_xor_sync(unsigned mask, float x, int step) { return __shfl_sync(mask, x, threadIdx.x % 32 ^ step); }
template <class T> static unsigned long long __cvta_generic_to_shared(T) { return 0; }
"""
RUN = r"""
static const Args* given;
static void begin() {
    KERNEL(*given);
    threads[threadIdx.x].ended = true;
    others();
}
extern "C" void run(const Args* arguments, int blocks) {
    given = arguments;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (auto& thread : threads) {
            thread.runs = thread.ended = false;
            getcontext(&thread.begun);
            thread.begun.uc_stack.ss_sp = thread.stack, thread.begun.uc_stack.ss_size = sizeof thread.stack;
            makecontext(&thread.begun, begin, 0);
        }
        volatile bool done = false;
        getcontext(&outside);
        if (done) continue;
        done = true, threadIdx.x = 0, threads[0].runs = true;
        setcontext(&threads[0].begun);
    }
}
"""


def _plain(source: str) -> str:
    """The source without PTX."""
    source = re.sub(r'#include "(.*?)"', lambda found: _plain((nvrtc.HERE / found[1]).read_text()), source)
    one = r'asm\("cvt\.rn\.bf16\.f32 %0, %1;" : "=h"\((\w+)\) : "f"\((\w+)\)\);'
    two = r'asm\("cvt\.rn\.bf16x2\.f32 %0, %1, %2;" : "=r"\((.*?)\) : "f"\((.*?)\), "f"\((.*?)\)\);'
    fp8 = r'asm\("cvt\.rn\.satfinite\.e4m3x2\.f32 %0, %1, %2;" : "=h"\((\w+)\) : "f"\(0\.0f\), "f"\((\w+)\)\);'
    mma = r'asm volatile\("mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32 .*?\);'
    source = re.sub(mma, "product(c, a, b0, b1);", source, flags=re.DOTALL)
    source = re.sub(fp8, r"\1 = e4m3(\2);", source)
    source = re.sub(one, r"\1 = rounded(\2);", source)
    source = re.sub(two, r"\1 = rounded(\3) | unsigned(rounded(\2)) << 16;", source)
    return re.sub(r"\basm\b(\s+volatile)?\s*\(.*?\);", ";", source, flags=re.DOTALL)


@cache
def _compiled(file: str, name: str, defines: tuple[tuple[str, int], ...]) -> Any:
    text = SHIM + _plain((nvrtc.HERE / file).read_text()) + RUN.replace("KERNEL", name)
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-w", *(f"-D{n}={v}" for n, v in defines)]
    key = hashlib.sha256(f"{text}{flags}".encode()).hexdigest()[:16]
    made = Path(gettempdir()) / f"hal-cuda-double-{key}.so"
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *flags, "-x", "c++", "-", "-o", str(part)], input=text, text=True, check=True)
        part.rename(made)  # whole, whoever else makes it
    return ctypes.CDLL(str(made)).run


class Function:
    """Stands for ``nvrtc.Function``."""

    def __init__(self, file: str, name: str, arch: str, defines: Mapping[str, int], **_: Any) -> None:
        # one block a head, whatever the settings say: its warps take the rows of all blocks in more steps
        self._blocks = defines["SPLIT"]
        asked = {**defines, "SPLIT": 1, "ALIGNED": 0, "PDL": 0, "EARLY": 0, "BLOCKS": 1}
        if "ACROSS" in defines:  # warps that share 16 rows
            asked["WARPS"] = defines["V"] // 16 * defines["ACROSS"]
        self._source = file, name, tuple(sorted(asked.items()))

    def __call__(self, blocks: int, arguments: ctypes.Structure) -> None:
        _compiled(*self._source)(ctypes.byref(arguments), blocks // self._blocks)
