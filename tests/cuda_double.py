"""CUDA C++ of the cuda backend on a CPU: a thread of the host for each thread of a block, blocks one after the other.

What a file says in PTX is replaced: conversions by the host's, fences and prefetches by nothing. Clusters and bulk
copies are not doubled, so launches of one block a head only, whose state may lie anywhere (``ALIGNED`` 0).
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from hal_cuda.code import nvrtc

SHIM = r"""
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
struct Dim { int x; };
static thread_local Dim threadIdx, blockIdx;
static float exchanged[64][32];
static std::barrier<>* of_block;
static std::vector<std::barrier<>*> of_warp;
template <class To, class From> static To bits(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
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
static void __syncthreads() { of_block->arrive_and_wait(); }
static float __shfl_sync(unsigned, float x, int from) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    exchanged[warp][lane] = x;
    of_warp[warp]->arrive_and_wait();
    const float found = exchanged[warp][from % 32];
    of_warp[warp]->arrive_and_wait();
    return found;
}
static float __shfl_xor_sync(unsigned mask, float x, int step) { return __shfl_sync(mask, x, threadIdx.x % 32 ^ step); }
template <class T> static unsigned long long __cvta_generic_to_shared(T) { return 0; }
"""
RUN = r"""
extern "C" void run(const Args* arguments, int blocks) {
    std::barrier block(THREADS);
    of_block = &block;
    std::vector<std::thread> threads;
    of_warp.clear();
    for (int w = 0; w < WARPS; w++) of_warp.push_back(new std::barrier<>(32));
    for (int t = 0; t < THREADS; t++)
        threads.emplace_back([=, &block] {
            threadIdx.x = t;
            for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
                KERNEL(*arguments);
                block.arrive_and_wait();
            }
        });
    for (auto& thread : threads) thread.join();
    for (auto* warp : of_warp) delete warp;
}
"""


def _plain(source: str) -> str:
    """The source without PTX."""
    source = re.sub(r'#include "(.*?)"', lambda found: _plain((nvrtc.HERE / found[1]).read_text()), source)
    one = r'asm\("cvt\.rn\.bf16\.f32 %0, %1;" : "=h"\((\w+)\) : "f"\((\w+)\)\);'
    two = r'asm\("cvt\.rn\.bf16x2\.f32 %0, %1, %2;" : "=r"\((.*?)\) : "f"\((.*?)\), "f"\((.*?)\)\);'
    fp8 = r'asm\("cvt\.rn\.satfinite\.e4m3x2\.f32 %0, %1, %2;" : "=h"\((\w+)\) : "f"\(0\.0f\), "f"\((\w+)\)\);'
    source = re.sub(fp8, r"\1 = e4m3(\2);", source)
    source = re.sub(one, r"\1 = rounded(\2);", source)
    source = re.sub(two, r"\1 = rounded(\3) | unsigned(rounded(\2)) << 16;", source)
    return re.sub(r"\basm\b(\s+volatile)?\s*\(.*?\);", ";", source, flags=re.DOTALL)


@cache
def _compiled(file: str, name: str, defines: tuple[tuple[str, int], ...]) -> Any:
    text = SHIM + _plain((nvrtc.HERE / file).read_text()) + RUN.replace("KERNEL", name)
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-w", *(f"-D{n}={v}" for n, v in defines)]
    key = hashlib.sha256(f"{text}{flags}".encode()).hexdigest()[:16]
    made = Path(gettempdir()) / f"hal-cuda-double-{key}.so"
    if not made.exists():
        subprocess.run(["g++", *flags, "-x", "c++", "-", "-o", str(made)], input=text, text=True, check=True)
    return ctypes.CDLL(str(made)).run


class Function:
    """Stands for ``nvrtc.Function``."""

    def __init__(self, file: str, name: str, arch: str, defines: Mapping[str, int], **_: Any) -> None:
        # one block a head, whatever the settings say: its warps take the rows of all blocks in more steps
        self._blocks = defines["SPLIT"]
        asked = {**defines, "SPLIT": 1, "ALIGNED": 0, "PDL": 0, "EARLY": 0}
        self._run = _compiled(file, name, tuple(sorted(asked.items())))

    def __call__(self, blocks: int, arguments: ctypes.Structure) -> None:
        self._run(ctypes.byref(arguments), blocks // self._blocks)
