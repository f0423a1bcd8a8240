"""Try the arrangements and settings of the decode cores on the GPU that is here.

    PYTHONPATH=.:backends/torch:backends/triton:backends/cuda:models python bench/try_decode.py [seconds]

For each head config, state dtype and batch: every variant is checked on one step against the torch
kernel (float32, on the GPU), then timed as a CUDA graph of many launches, each on slots and inputs of
its own, 200 MB and more in all, so that the L2 cache does not help. ``floor`` is all bytes that must
move at 4.28 TB/s. Partial results are printed as they come; with OUT set, OUT/decode.json has all.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hal_cuda.code.gated_delta import decode as cuda_decode
from hal_torch.code.gated_delta import decode as torch_decode
from hal_triton.code.gated_delta import decode as triton_decode
from peers import delta_updates

import hal
from hal.batch import make_batch
from hal.layout import VK, Ring
from hal.ops import GatedDeltaDecode

CODE = {"cuda": cuda_decode, "triton": triton_decode}
DEVICE = hal.load_device("h200")
CEILING = 4.28e12
ROTATE = 200e6
HEADS = ((16, 32), (4, 8), (16, 64))
BATCHES = (1, 8, 16, 64, 128, 256)
# the norm's output and the state, as a share of the largest value: two roundings of bfloat16
TOLERANCE = 2.0**-7
START, LIMIT = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 220.0
Variant = tuple[str, dict[str, Any]]


def variants(rows: int, heads: int, kind: str) -> list[Variant]:
    """Kernel and settings worth trying at so many programs."""
    few, found = rows * heads <= 512, []

    def triton(split: int, block: int, depth: int, stages: int, warps: int, **more: Any) -> None:
        found.append(("triton", {"SPLIT": split, "BV": block, "DEPTH": depth, "STAGES": stages, "num_warps": warps,
                                 "num_stages": 1, "EVICT": "evict_first", "ONCE": True, "PDL": True, "rows": rows}
                      | more))  # fmt: skip

    def cuda(
        split: int, warps: int, most: int, ahead: int = 0, blocks: int = 1, pdl: bool = True, early: bool = False
    ) -> None:
        each = 128 // split // warps
        if each:
            launch = {"SPLIT": split, "WARPS": warps, "ROWS": min(most, each), "AHEAD": int(ahead and each > most),
                      "EARLY": int(early), "BLOCKS": blocks}  # fmt: skip
            found.append(("cuda", {"PDL": pdl, "unaligned": launch, "more": launch}))

    if few:
        triton(16, 8, 1, 1, 1)
        for early in (False, True):
            for split, warps in ((1, 8), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8), (8, 4)):
                cuda(split, warps, 8, 1, early=early)
        return found
    triton(1, 8, 0, 4, 1)
    for warps, ahead, blocks in ((4, 0, 1), (4, 1, 1), (8, 0, 1), (8, 1, 1), (4, 0, 8)):
        cuda(1, warps, 8, ahead, blocks)
    cuda(1, 8, 8, 1, early=True)
    cuda(1, 4, 8, 1, early=True)
    if kind == "bfloat16":
        cuda(1, 4, 16)
    return found


def make_site(op: GatedDeltaDecode, conv: torch.Tensor, small: dict[str, torch.Tensor], settings: Any) -> Any:
    weights = {"conv_weight": conv, **small}
    keys = count()
    return SimpleNamespace(
        op=op, settings=settings, layouts={"conv": Ring(4), "delta": VK()}, scales={},
        weight=lambda name, layout=None: weights[name],
        runtime=SimpleNamespace(place="cuda", device=DEVICE),
        planned=lambda plan: ("plan", next(keys)),
    )  # fmt: skip


def prepare(kernel: str, op: GatedDeltaDecode, weights: Any, settings: dict[str, Any]) -> Any:
    """The kernel's callable for a site with these settings."""
    return CODE[kernel](make_site(op, *weights, settings))


def floor(op: GatedDeltaDecode, rows: int) -> float:
    """Microseconds at the measured ceiling."""
    state = op.value_dim * op.key_head_dim * (4 if op.state_dtype == "float32" else 2)
    ring = op.conv_dim * 2 * (3 + 1)
    edges = 2 * (op.conv_dim + 2 * op.value_dim + 2 * op.value_heads)
    return rows * (2 * state + ring + edges) / CEILING * 1e6


class Bench:
    """Pools, inputs and batches of one config; ``steps`` launches rotate over them."""

    def __init__(self, op: GatedDeltaDecode, rows: int) -> None:
        self.op, self.rows = op, rows
        kind = getattr(torch, op.state_dtype)
        each = op.value_dim * op.key_head_dim * kind.itemsize
        self.steps = max(40 if rows < 64 else 20 if rows < 256 else 6, int(ROTATE / (rows * each)) + 1)
        slots = self.steps * rows
        torch.manual_seed(0)
        shape = (slots, op.value_heads, op.value_head_dim, op.key_head_dim)
        self.delta = torch.empty(shape, dtype=kind, device="cuda").normal_(0, 0.1)
        self.ring = torch.randn(slots, op.conv_dim, 4, dtype=torch.bfloat16, device="cuda")
        wide = op.conv_dim + op.value_dim + 2 * op.value_heads
        order = torch.randperm(slots).tolist()
        self.inputs, self.batches = [], []
        for step in range(self.steps):
            whole = torch.randn(rows, -(-wide // 64) * 64, dtype=torch.bfloat16, device="cuda")
            widths = [op.conv_dim, op.value_dim, op.value_heads, op.value_heads]
            self.inputs.append(whole[:, :wide].split(widths, 1))
            mine = order[step * rows : (step + 1) * rows]
            contexts = [0 if i == 2 else 5 + i for i in range(rows)]
            if step:
                contexts = [5 + i for i in range(rows)]
            self.batches.append(make_batch("decode", [1] * rows, contexts, mine, device="cuda"))
        conv = torch.randn(op.conv_dim, 4, dtype=torch.bfloat16, device="cuda") * 0.5
        self.weights = (conv, {
            "A_log": torch.randn(op.value_heads, device="cuda") * 0.5 + 0.5,
            "dt_bias": torch.randn(op.value_heads, dtype=torch.bfloat16, device="cuda"),
            "norm": torch.ones(op.value_head_dim, dtype=torch.bfloat16, device="cuda"),
        })  # fmt: skip
        slots_0 = self.batches[0].slots.long()
        # timing moves the pools on; checks always start from here
        self.start = (self.ring[slots_0].clone(), self.delta[slots_0].clone())
        self.expected = self._expected()

    def _mine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of step 0, as a pool of their own."""
        ring, delta = self.start
        return ring.clone(), delta.clone()

    def _one(self) -> Any:
        host = self.batches[0].host
        return make_batch("decode", host.lengths, host.contexts, range(self.rows), device="cuda")

    def _expected(self) -> tuple[torch.Tensor, ...]:
        batch, pools = self._one(), self._mine()
        site = make_site(self.op, *self.weights, {})
        site.planned = lambda plan: batch.plans.setdefault("plan", plan(batch)) and "plan"
        return torch_decode(site)(self.inputs[0], pools, batch), *pools

    def wrong(self, run: Any) -> str:
        """What differs from the torch kernel on step 0, run twice for the counters; nothing where all is near."""
        for _ in range(2):
            batch, pools = self._one(), self._mine()
            got = (run(self.inputs[0], pools, batch), *pools)
            for name, have, want in zip(("out", "ring", "state"), got, self.expected, strict=True):
                if name == "ring":
                    if not torch.equal(have, want):
                        return "ring differs"
                    continue
                share = TOLERANCE if have.dtype == torch.bfloat16 else 2.0**-17
                error = float((have.float() - want.float()).abs().max() / want.float().abs().max())
                if not error <= share:
                    return f"{name} off by {error:.2g} of the largest value"
        return ""

    def time(self, run: Any) -> float:
        """Microseconds of one launch of a kernel of ours."""
        steps = zip(self.inputs, self.batches, strict=True)
        return replayed([partial(run, given, (self.ring, self.delta), batch) for given, batch in steps])


def replayed(calls: list[Callable[[], Any]]) -> float:
    """Microseconds of one call: what two more replays of a graph of all add, the least of five times."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def times(count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    times(1)
    one, three = (min(times(count) for _ in range(5)) for count in (1, 3))
    return (three - one) / 2 / len(calls)


def compile_all(bench: Bench, wanted: list[Variant]) -> None:
    """Compile side by side: ptxas runs outside the interpreter lock."""

    def one(variant: Variant) -> None:
        prepare(variant[0], bench.op, bench.weights, variant[1])(bench.inputs[0], bench._mine(), bench._one())

    with ThreadPoolExecutor(16) as pool:
        for job in [pool.submit(one, v) for v in wanted]:
            if job.exception() is not None:
                print("  compile:", str(job.exception()).splitlines()[0], flush=True)


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "hal", hal.__file__, flush=True)
    results: list[dict[str, Any]] = []
    for kind in ("float32", "bfloat16"):
        best: dict[int, list[Variant]] = {}  # of the first head config, by programs
        for key_heads, heads in HEADS:
            op = GatedDeltaDecode(key_heads=key_heads, value_heads=heads, key_head_dim=128, value_head_dim=128)
            op = replace(op, state_dtype=kind)
            for rows in BATCHES:
                if time.time() - START > LIMIT:
                    print(f"out of time before {key_heads}/{heads} {kind} batch {rows}")
                    continue
                bench, wanted, table = Bench(op, rows), variants(rows, heads, kind), []
                if (key_heads, heads) != HEADS[0] and best:
                    near = best[min(best, key=lambda n: abs(math.log(n / (rows * heads))))]
                    wanted = [(k, {**given, "rows": rows} if k == "triton" else given) for k, given in near[:5]]
                compile_all(bench, wanted)
                for kernel, settings in wanted:
                    shown = {k: v for k, v in settings.items() if k not in ("ONCE", "num_stages", "rows")}
                    try:
                        run = prepare(kernel, op, bench.weights, settings)
                        wrong = bench.wrong(run)
                        taken = bench.time(run)
                    except Exception as error:  # noqa: BLE001 - too much shared memory, say
                        print(f"  {kernel} {shown}: {str(error).splitlines()[0]}", flush=True)
                        torch.cuda.synchronize()
                        continue
                    table.append((taken, kernel, shown, wrong, settings))
                updates = delta_updates(
                    op, bench.inputs, bench.batches, [bench.delta] * len(bench.batches), bench.weights[1]
                )
                for name, calls in updates.items():
                    table.append((replayed(calls), name, {}, "", {}))
                least = floor(op, rows)
                print(f"\n{key_heads}/{heads} {kind} batch {rows}: floor {least:.2f} us", flush=True)
                table.sort(key=lambda line: -line[0])
                for taken, kernel, shown, wrong, _ in table:
                    text = " ".join(f"{k}={v}" for k, v in shown.items()) + (f" WRONG: {wrong}" if wrong else "")
                    print(f"  {taken:8.2f} us {100 * least / taken:5.1f} %  {kernel} {text}", flush=True)
                    results.append({"heads": [key_heads, heads], "state": kind, "rows": rows, "us": taken})
                    results[-1] |= {"floor_us": least, "kernel": kernel, "settings": shown, "wrong": wrong}
                if (key_heads, heads) == HEADS[0] and table:
                    best[rows * heads] = [
                        (kernel, settings) for _, kernel, _, _, settings in reversed(table) if settings
                    ]
                if where := os.environ.get("OUT"):
                    Path(where, "decode.json").write_text(json.dumps(results, indent=1))
                del bench
    print(f"{time.time() - START:.0f} s", flush=True)


if __name__ == "__main__":
    main()
