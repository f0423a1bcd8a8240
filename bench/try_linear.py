"""Products with few rows on this device: cuBLAS beside variants of the portable kernels.

``PYTHONPATH=.:backends/torch:backends/triton python bench/try_linear.py``; prints per shape and rows the
microseconds over bytes / 4.22 TB/s, writes ``$OUT/linear.json``. Graphs replay over rotating weights
of at least 200 MB. PDL is a chain of launches in a graph.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from hal_triton.code.linear import few_kernel, one_kernel, product_few, product_one, sum_kernel
from hal_triton.needs import cdiv, next_power_of_2

SHAPES = (
    (12352, 2560), (2560, 4096), (18432, 2560), (2560, 9216), (10240, 2560), (8240, 5120), (1028, 1024), (248320, 2560),
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CEILING = 4.22e12  # bytes per second, as the issue counts
ROTATED = 200e6
SECONDS = 220.0  # no new shape after this
START = time.perf_counter()
Settings = dict[str, Any]
Variant = tuple[str, Settings]


def one_variants(k: int) -> list[Variant]:
    """gemm_one: as many warps side by side as divide K; blocks and depths around the default."""
    warps = next((w for w in (4, 2, 1) if k % (256 * w) == 0), 4)
    tries = ((8, 1, warps), (4, 1, warps), (4, 2, warps), (16, 1, warps), (2, 2, warps))
    return [("one", {"BLOCK_N": n, "BLOCK_K": 256 * w, "DEPTH": d, "PDL": False, "num_warps": w}) for n, d, w in tries]


def few_variants(rows: int, n: int) -> list[Variant]:
    """gemm_few and gemm_some: (BLOCK_N, BLOCK_K, SPLIT, DEPTH, warps, stages)."""
    tries: tuple[tuple[int, ...], ...]
    if rows <= 16:
        tries = (
            (32, 256, 1, 0, 4, 4), (16, 256, 1, 0, 4, 4), (32, 128, 1, 0, 4, 6), (64, 128, 1, 0, 4, 5),
            (16, 256, 1, 2, 4, 1), (32, 256, 1, 1, 4, 1), (64, 128, 1, 2, 4, 1), (16, 512, 1, 0, 4, 3),
        )  # fmt: skip
        splits: tuple[tuple[int, ...], ...] = ((16, 256, 3, 0, 4, 4), (32, 256, 3, 0, 4, 4), (32, 256, 5, 1, 4, 1))
    else:
        tries = ((64, 64, 1, 0, 4, 6), (64, 128, 1, 0, 4, 3), (128, 64, 1, 0, 4, 4), (32, 128, 1, 0, 4, 3))
        splits = ((64, 64, 3, 0, 4, 5), (64, 128, 5, 0, 4, 3))
    names = ("BLOCK_N", "BLOCK_K", "SPLIT", "DEPTH", "num_warps", "num_stages")
    wanted = tries + (splits if n < 6000 else ())
    return [("few", dict(zip(names, t, strict=True)) | {"PDL": False}) for t in wanted]


def variants(rows: int, n: int, k: int) -> list[Variant]:
    """What is tried for so many rows."""
    return (one_variants(k) if rows <= 8 else []) + few_variants(rows, n)


def short(variant: Variant) -> str:
    """``few 32x256 split 1 depth 0 warps 4 stages 4``."""
    s = variant[1]
    tail = f" split {s['SPLIT']} stages {s['num_stages']}" if "SPLIT" in s else ""
    pdl = " pdl" if s["PDL"] else ""
    return f"{variant[0]} {s['BLOCK_N']}x{s['BLOCK_K']} depth {s['DEPTH']} warps {s['num_warps']}{tail}{pdl}"


def launch(variant: Variant, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``x [rows, K]``, ``weight [N, K]`` to ``out [rows, N]``."""
    (product_one if variant[0] == "one" else product_few)(x, weight, out, **variant[1])


def prepare(variant: Variant, rows: int, n: int, k: int) -> None:
    """Compile only; equal kernels of different rows meet in Triton's cache."""
    kind, s = variant[0], dict(variant[1])
    options: Settings = {"launch_pdl": True} if s["PDL"] else {}
    bf16, fixed = torch.bfloat16, {"N": n, "K": k, "enable_fp_fusion": True}
    if kind == "one":
        width = next_power_of_2(rows)
        one_kernel.warmup(bf16, bf16, bf16, k, rows, ROWS=width, grid=(1,), **s, **fixed, **options)
        return
    out = bf16 if s["SPLIT"] == 1 else torch.float32
    block = max(16, next_power_of_2(rows))
    few_kernel.warmup(bf16, bf16, out, k, rows, BLOCK_M=block, grid=(1,), **s, **fixed, **options)
    if s["SPLIT"] > 1:
        split = {"SPLIT": s["SPLIT"], "BLOCK": 256, "PDL": s["PDL"]}
        sum_kernel.warmup(torch.float32, bf16, rows * n, grid=(1,), num_warps=2, **split, **options)


def prepare_all(n: int, k: int) -> str:
    """Compile all variants of a shape in threads; says what did not compile."""
    wanted = {}
    for rows in ROWS:
        for v in variants(rows, n, k):
            width = next_power_of_2(rows) if v[0] == "one" else max(16, rows)
            wanted[short(v), width] = (v, rows)
    failed = []

    def work(item: tuple[Variant, int]) -> None:
        try:
            prepare(item[0], item[1], n, k)
        except Exception as error:  # noqa: BLE001 - a variant that does not compile is a result
            failed.append(f"{short(item[0])} rows {item[1]}: {error!r:.120}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, wanted.values()))
    return f"{len(wanted)} variants" + "".join(f"\n  failed: {line}" for line in failed)


def timed(call: Callable[[int], object], copies: int) -> float:
    """Microseconds a call, least of five replays of a graph of ten or more calls."""
    for i in range(2):
        call(i % copies)
    torch.cuda.synchronize()
    count = cdiv(max(12, copies), copies) * copies
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


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Largest difference from float64, as a share of the largest value, on 64 columns spread over N."""
    columns = torch.linspace(0, weight.shape[0] - 1, 64, device=x.device).long()
    real = x.double() @ weight[columns].double().T
    return float((got[:, columns].double() - real).abs().max() / real.abs().max())


def invariant(variant: Variant, x: torch.Tensor, weight: torch.Tensor, least: int, most: int) -> bool:
    """Whether a row has the same bits whatever the number of rows."""
    found = []
    for rows in range(least, most + 1):
        out = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
        launch(variant, x[:rows], weight, out)
        found.append(out[0])
    return all(torch.equal(found[0], other) for other in found)


def measure(variant: Variant, x: torch.Tensor, weights: list[torch.Tensor], floor: float) -> Settings:
    """Time over the floor and error of one variant."""
    rows, n = x.shape[0], weights[0].shape[0]
    outs = [torch.full((rows, n), float("nan"), dtype=x.dtype, device=x.device) for _ in range(2)]
    try:
        launch(variant, x, weights[0], outs[0])
        off = error(outs[0], x, weights[0])
        over = timed(lambda i: launch(variant, x, weights[i], outs[i % 2]), len(weights)) - floor
    except Exception as raised:  # noqa: BLE001 - a variant that does not run is a result
        return {"variant": short(variant), "settings": variant[1], "failed": f"{raised!r:.200}"}
    return {"variant": short(variant), "settings": variant[1], "over_us": round(over, 2), "error": off}


def shape(n: int, k: int) -> list[Settings]:
    """All rows of one shape."""
    begun = time.perf_counter()
    said = prepare_all(n, k)
    print(f"\n{n} x {k}: {n * k * 2 / 1e6:.1f} MB, compiled {said} in {time.perf_counter() - begun:.0f} s", flush=True)
    copies = max(1, cdiv(int(ROTATED), n * k * 2))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(copies)]
    whole = torch.randn(128, k, device="cuda", dtype=torch.bfloat16)
    rows_found = []
    for rows in ROWS:
        x = whole[:rows]
        floor = (n * k + rows * (n + k)) * 2 / CEILING * 1e6
        cublas = timed(lambda i, x=x: torch.nn.functional.linear(x, weights[i]), copies) - floor  # type: ignore[misc]
        tried = variants(rows, n, k)
        found = [measure(v, x, weights, floor) for v in tried]
        ran = sorted((i for i, f in enumerate(found) if "over_us" in f), key=lambda i: found[i]["over_us"])
        # the best with PDL, and the best whose weights are under way before the wait
        deep = [i for i in ran if tried[i][1]["DEPTH"]]
        overlapped = [
            measure((tried[i][0], tried[i][1] | {"PDL": True}), x, weights, floor)
            for i in dict.fromkeys([*ran[:2], *deep[:2]])
        ]
        overlapped.sort(key=lambda f: f.get("over_us", float("inf")))
        wrong = [f["variant"] for f in (*found, *overlapped) if not f.get("error", 1.0) < 2**-7]
        print(f"M {rows:3} floor {floor:7.2f}  cuBLAS +{cublas:.2f}", flush=True)
        for f in [found[i] for i in ran[:3]] + overlapped[:2]:
            print(f"      +{f.get('over_us', f.get('failed'))}  {f['variant']}")
        if wrong:
            print(f"      wrong or failed: {wrong}")
        rows_found.append(
            {"N": n, "K": k, "rows": rows, "floor_us": floor, "cublas_over_us": round(cublas, 2),
             "variants": found, "pdl": overlapped}
        )  # fmt: skip
        write(rows_found, f"{n}x{k}")
        if rows in (4, 16) and ran:
            kind, least = ("one", 1) if rows == 4 else ("few", 5)
            best = next((tried[i] for i in ran if tried[i][0] == kind), None)
            if best:
                same = invariant(best, whole, weights[0], least, rows)
                print(f"      the same bits for a row at {least}..{rows} rows: {same} ({short(best)})")
    return rows_found


RESULTS: dict[str, list[Settings]] = {}


def write(found: list[Settings], name: str) -> None:
    """``$OUT/linear.json``, after each measurement."""
    RESULTS[name] = found
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    Path(os.environ.get("OUT", "."), "linear.json").write_text(
        json.dumps({"about": about, "shapes": RESULTS}, indent=1)
    )


def main() -> None:
    torch.manual_seed(0)
    for n, k in SHAPES:
        if time.perf_counter() - START > SECONDS:
            print(f"{n} x {k}: no time left")
            continue
        shape(n, k)
        torch.cuda.empty_cache()
    print(f"\n{time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
