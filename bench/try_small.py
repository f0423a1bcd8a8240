"""Times the portable norms, SiluMul and QKNormRope over launch settings: ``python bench/try_small.py`` on a GPU.

Each figure is a CUDA graph replayed over rotating buffers, 200 MB of them or a thousand; 200 MB are
written before each replay, so that no argument is read from the L2 cache. Percent are of 4.28 TB/s,
what ``torch.mul(x, 1, out=y)`` reaches on an H200.
Results go to ``$OUT/small.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from hal_triton.code import norms, rope, small
from hal_triton.needs import next_power_of_2
from hal_triton.norms import TritonAddRMSNorm, TritonRMSNorm
from hal_triton.rope import TritonQKNormRope, TritonQKNormRopeTiled
from hal_triton.small import TritonGatedRMSNorm, TritonSiluMul

import hal
from hal.ops import AddRMSNorm, GatedRMSNorm, QKNormRope, RMSNorm, SiluMul

CEILING = 4.28e12  # bytes a second
ROTATION = 200e6  # bytes
ROWS = (1, 8, 64, 4096)
BUDGET = 110.0  # seconds
PLACE = "cuda"
DEVICE = hal.load_device("h200")
Bench = tuple[str, Any, int, dict[str, Any], bool, Callable[[Any], Any], Callable[[], Any]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=PLACE, dtype=torch.bfloat16)


def site(op: Any, settings: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    runtime = SimpleNamespace(place=PLACE, rank=0)
    return SimpleNamespace(op=op, settings=settings, scales={}, weight=weights.__getitem__, runtime=runtime)


def microseconds(call: Callable[[Any], Any], make: Callable[[], Any], moved: int) -> float:
    """Time of one call, the median of five replays of a graph over all buffers."""
    flush = torch.empty(int(ROTATION), dtype=torch.uint8, device=PLACE)
    copies = max(2, min(1000, int(ROTATION / moved) + 1))
    buffers = [make() for _ in range(copies)]
    call(buffers[0])
    torch.cuda.synchronize()
    # the results are kept, so that each call writes elsewhere
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for buffer in buffers:
            kept.append(call(buffer))
    times = []
    for _ in range(6):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / copies)
    return sorted(times[1:])[2]


def unique(variants: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    for variant in variants:
        if variant not in seen:
            seen.append(variant)
            yield variant


def row_norms(rows: int) -> Iterator[Bench]:
    for hidden in (2560, 4096):
        weights = {"norm": random(hidden)}
        for op, kernel, code, count in (
            (RMSNorm(hidden=hidden), TritonRMSNorm, norms.rms_norm, 1),
            (AddRMSNorm(hidden=hidden), TritonAddRMSNorm, norms.add_rms_norm, 2),
        ):
            chosen = dict(kernel().settings(op, DEVICE))
            for settings in unique([chosen, *({**chosen, "num_warps": w} for w in (2, 4, 8, 16))]):
                call = code(site(op, settings, weights))
                yield (
                    op.title(),
                    op,
                    rows,
                    settings,
                    settings == chosen,
                    lambda b, call=call: call(*b),
                    lambda hidden=hidden, count=count: [random(rows, hidden) for _ in range(count)],
                )


def silu_muls(rows: int) -> Iterator[Bench]:
    op = SiluMul(columns=9216)
    chosen = dict(TritonSiluMul().settings(op, DEVICE))
    others = [
        {"BLOCK": b, "num_warps": w} for b, w in ((512, 2), (1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 8))
    ]
    for settings in unique([chosen, *others]):
        call = small.silu_mul(site(op, settings, {}))
        yield "SiluMul", op, rows, settings, settings == chosen, call, lambda: random(rows, 2 * op.columns)


def gated_norms(rows: int) -> Iterator[Bench]:
    op = GatedRMSNorm(value_heads=32, value_head_dim=128)
    chosen = dict(TritonGatedRMSNorm().settings(op, DEVICE))
    weights = {"norm": random(128)}
    others = [
        {"BLOCK": 128, "GROUP": g, "num_warps": w}
        for g, w in ((2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (32, 8))
    ]
    for settings in unique([chosen, *others]):
        call = small.gated_rms_norm(site(op, settings, weights))
        yield (
            "GatedRMSNorm",
            op,
            rows,
            settings,
            settings == chosen,
            lambda b, call=call: call(*b),
            lambda: (random(rows, 32, 128), random(rows, 4096)),
        )


def ropes(rows: int) -> Iterator[Bench]:
    op = QKNormRope(heads=16, kv_heads=4, head_dim=256, rotary_dim=64, theta=1e7, sections=(11, 11, 10))
    weights = {"q_norm": random(256), "k_norm": random(256)}
    token = dict(TritonQKNormRope().settings(op, DEVICE))
    tiled = dict(TritonQKNormRopeTiled().settings(op, DEVICE))
    chosen = token if rows <= 64 else tiled
    others = [
        {"ROWS": r, "GROUP": g, "num_warps": w}
        for r, g, w in (
            (1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 4, 2), (1, 4, 4), (1, 8, 2), (1, 8, 4), (1, 16, 4), (1, 16, 8),
            (2, 4, 2), (2, 4, 4), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 2, 2), (4, 1, 1), (8, 1, 2),
        )
    ]  # fmt: skip
    batch = SimpleNamespace(
        positions=torch.arange(rows, device=PLACE).expand(3, rows).contiguous(),
        cells=torch.randperm(max(rows, 16), device=PLACE)[:rows],
    )

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return random(rows, op.width), random(next_power_of_2(rows) // 16 + 1, 2, 16, 4, 256)

    for settings in unique([token, tiled, *others]):
        call = rope.qk_norm_rope(site(op, settings, weights))
        yield (
            "QKNormRope",
            op,
            rows,
            settings,
            settings == chosen,
            lambda b, call=call: call(b[0], (b[1],), batch),
            make,
        )


def moved(op: Any, rows: int) -> int:
    """Bytes of one call; of qkv all but the gate, which is a view."""
    if isinstance(op, QKNormRope):
        return 2 * 2 * rows * (op.heads + 2 * op.kv_heads) * op.head_dim
    return int(op.traffic(rows).bytes)


def main() -> None:
    started, results = time.monotonic(), []
    # the most rows first: what is asked of bandwidth
    for rows in sorted(ROWS, reverse=True):
        for family in (ropes, row_norms, silu_muls, gated_norms):
            for title, op, _, settings, chosen, call, make in family(rows):
                if time.monotonic() - started > BUDGET:
                    print(f"stopped after {BUDGET} s", file=sys.stderr)
                    return write(results)
                size = moved(op, rows)
                us = microseconds(call, make, size)
                rate = size / us * 1e6
                percent = 100 * rate / CEILING
                results.append(
                    {"op": str(op), "rows": rows, "settings": settings, "chosen": chosen, "us": us, "bytes": size}
                    | {"gb_s": rate / 1e9, "percent": percent}
                )
                mark = "*" if chosen else " "
                width = getattr(op, "hidden", "")
                figures = f"{us:8.2f} us {rate / 1e9:8.0f} GB/s {percent:6.1f} %"
                print(f"{mark} {title:13}{width!s:5} rows {rows:5}  {figures}  {settings}", flush=True)
            write(results)
    return None


def write(results: list[dict[str, Any]]) -> None:
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "ceiling": CEILING,
        "results": results,
    }
    (Path(os.environ.get("OUT", ".")) / "small.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
