"""Products with few rows on this device: cuBLAS beside the portable kernels and variants of those in CUDA C++.

``PYTHONPATH=.:backends/torch:backends/triton:backends/cuda python bench/try_linear.py [seconds] [rows ...]``;
prints per shape and rows the microseconds over bytes / 4.22 TB/s, writes ``$OUT/linear.json``. A graph of
launches that overlap where they can (PDL) replays over rotating weights of at least 200 MB. ``mlp`` is the
product of gate and up with SiLU; cuBLAS's is timed without that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from hal_cuda.code.few_rows import Product, width
from hal_triton.code.linear import product_few, product_one
from hal_triton.linear import few_settings, one_settings

import hal

SHAPES = (
    ("in_proj", 12352, 2560), ("out", 2560, 4096), ("mlp", 18432, 2560), ("down", 2560, 9216),
    ("qkv", 10240, 2560), ("head", 248320, 2560),
)  # fmt: skip
ROWS = (1, 8, 16, 32, 64, 128)
CEILING = 4.22e12  # bytes per second, as the issue counts
ROTATED = 200e6
DEVICE = hal.load_device("h200")
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 200.0
START = time.perf_counter()
Settings = dict[str, Any]
SHARED = 227 * 1024


def variants(name: str, rows: int, n: int, k: int) -> list[Settings]:
    """Launches worth trying: GROUPS, SPLIT, STAGES, BOXES."""
    one, chunks = width(rows)
    held = one * chunks
    small = n < 6000
    found = []
    for groups in (1, 2, 3, 4):
        for split in (1,) if name in ("mlp", "head") else (2, 4, 8) if small else (1, 2):
            for stages, boxes in ((4, 1), (6, 1), (8, 1), (3, 2), (4, 2)):
                size = stages * boxes * (64 * groups + held) * 128 + 1024
                steps = -(-k // (64 * boxes))
                each = -(-steps // split)
                if size > SHARED or each * (split - 1) >= steps or (split > 1 and stages > each + 2):
                    continue
                if held * ((32 if name == "mlp" else 64) * groups + 4) * 4 > size - 1024:
                    continue
                found.append({"GROUPS": groups, "SPLIT": split, "STAGES": stages, "BOXES": boxes})
    return found


def timed(call: Callable[[int], object], copies: int) -> float:
    """Microseconds a call, least of six replays of a graph of a dozen calls or more."""
    for i in range(2):
        call(i % copies)
    torch.cuda.synchronize()
    count = -(-max(16, copies) // copies) * copies
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i % copies)
    best = float("inf")
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / count)
    return best


def real(x: torch.Tensor, weight: torch.Tensor, gated: bool, columns: torch.Tensor) -> torch.Tensor:
    """Some columns of the product in float64."""

    def some(part: torch.Tensor) -> torch.Tensor:
        return x.double() @ part[columns].double().T

    if not gated:
        return some(weight)
    gate, up = weight.chunk(2)
    return torch.nn.functional.silu(some(gate)) * some(up)


class Shape:
    """Weights and inputs of one shape."""

    def __init__(self, name: str, n: int, k: int) -> None:
        self.name, self.n, self.k, self.gated = name, n, k, name == "mlp"
        self.outputs = n // 2 if self.gated else n
        self.copies = max(1, -(-int(ROTATED) // (n * k * 2)))
        self.weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(self.copies)]
        self.x = torch.randn(128, k, device="cuda", dtype=torch.bfloat16)
        self.columns = torch.cat([torch.arange(64), torch.linspace(0, self.outputs - 1, 129).long()]).cuda()

    def check(self, products: Callable[[int, torch.Tensor, torch.Tensor], object], rows: int, gated: bool) -> float:
        """Largest difference as a share of the largest value; infinite where a byte was not written."""
        x, n = self.x[:rows], self.outputs if gated or not self.gated else self.n
        wide = torch.full((rows + 2, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        out = wide[1 : rows + 1]
        products(0, x, out)
        want = real(x, self.weights[0], gated, self.columns)
        torch.cuda.synchronize()
        if not out.isfinite().all() or not wide[0].isnan().all() or not wide[-1].isnan().all():
            return float("inf")
        return float((out[:, self.columns].double() - want).abs().max() / want.abs().max())


def measure(shape: Shape, rows: int) -> dict[str, Any]:
    x, k = shape.x[:rows], shape.k
    floor = (shape.n * k + rows * (shape.outputs + k)) * 2 / CEILING * 1e6
    found: list[dict[str, Any]] = []

    def note(name: str, settings: Settings, call: Callable[..., object], gated: bool) -> None:
        outs = [torch.empty(rows, shape.outputs if gated or not shape.gated else shape.n, device="cuda",
                            dtype=torch.bfloat16) for _ in range(2)]  # fmt: skip
        try:
            off = shape.check(call, rows, gated)
            over = timed(lambda i: call(i, x, outs[i % 2]), shape.copies) - floor
        except Exception as raised:  # noqa: BLE001 - a variant that does not run is a result
            found.append({"kernel": name, "settings": settings, "over_us": 1e9, "wrong": f"{raised!r:.200}"})
            return
        wrong = "" if off < 2**-7 else f"off by {off:.3g}"
        found.append({"kernel": name, "settings": settings, "over_us": round(over, 2), "wrong": wrong})

    note("cublas", {}, lambda i, x, out: torch.mm(x, shape.weights[i].T, out=out), False)
    size = (shape.n, k, DEVICE)
    if rows <= 2:
        one = one_settings(*size)
        note("triton one", dict(one), lambda i, x, out: product_one(x, shape.weights[i], out, one), False)
    elif rows <= 16:
        few = few_settings(*size)
        note("triton few", dict(few), lambda i, x, out: product_few(x, shape.weights[i], out, few), False)
    one, chunks = width(rows)
    for tiles in variants(shape.name, rows, shape.n, k):
        made = [Product(w, {str(one * chunks): tiles, "PDL": True}, "sm_90", shape.gated) for w in shape.weights]
        note("cuda", tiles, lambda i, x, out, made=made: made[i](x, out), shape.gated)
    found.sort(key=lambda f: f["over_us"])
    return {"shape": shape.name, "N": shape.n, "K": k, "rows": rows, "floor_us": floor, "variants": found}


def compile_all(shape: Shape, rows: list[int]) -> None:
    """All variants of a shape, in threads."""

    def work(item: tuple[int, Settings]) -> None:
        one, chunks = width(item[0])
        settings = {str(one * chunks): item[1], "PDL": True}
        Product(shape.weights[0], settings, "sm_90", shape.gated).compile(item[0])

    wanted = [(r, v) for r in rows for v in variants(shape.name, r, shape.n, shape.k)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, wanted))


def main() -> None:
    torch.manual_seed(0)
    rows = [int(r) for r in sys.argv[2:]] or list(ROWS)
    results = []
    for shape_ in SHAPES:
        if time.perf_counter() - START > SECONDS:
            print(f"{shape_}: no time left")
            continue
        shape = Shape(*shape_)
        begun = time.perf_counter()
        compile_all(shape, rows)
        print(f"\n{shape_}, compiled in {time.perf_counter() - begun:.0f} s", flush=True)
        for r in rows:
            result = measure(shape, r)
            results.append(result)
            print(f"M {r:3} floor {result['floor_us']:7.2f}", flush=True)
            tried = result["variants"]
            for v in [*tried[:5], *[t for t in tried[5:] if t["kernel"] != "cuda" or t["wrong"]][:4]]:
                words = " ".join(f"{a}={b}" for a, b in v["settings"].items()) if v["kernel"] == "cuda" else ""
                print(f"      +{v['over_us']}  {v['kernel']} {words} {v['wrong']}", flush=True)
            about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
            Path(os.environ.get("OUT", "."), "linear.json").write_text(
                json.dumps({"about": about, "shapes": results}, indent=1)
            )
        del shape
        torch.cuda.empty_cache()
    print(f"\n{time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
