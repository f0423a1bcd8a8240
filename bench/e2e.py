"""Decode of a whole model: (t[n outputs] - t[1 output]) / (n - 1) through the engine, ids read each step.

python bench/e2e.py [--model qwen3.5-4b] [--batches 1,16,64,128] [--profile] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from hal_models.engine import Engine, Request
from hal_models.made_up import fill
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import Qwen35
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

import hal


def seconds(engine: Engine, prompts: list[list[int]], outputs: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.generate([Request(p, outputs) for p in prompts])
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3.5-4b")
    parser.add_argument("--batches", default="1,16,64,128")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--outputs", type=int, default=128)
    parser.add_argument("--long", type=int, default=8192, help="tokens of the one long prefill; 0: none")
    parser.add_argument("--profile", action="store_true", help="profile a decode step of each batch too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    runtime = hal.Runtime(policy=hal.Policy.from_environment())
    model = Qwen35(configure(args.model), runtime)
    fill(model)
    most = args.prompt + args.outputs
    pages = max(max(batches) * (-(-most // 16) + 1), args.long // 16 + 2)
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        engine = Engine(model, slots=batch, pages=batch * (-(-most // 16) + 1), chunk=8192)
        prompts = torch.randint(1000, 200000, (batch, args.prompt), generator=generator).tolist()
        begin = time.perf_counter()
        seconds(engine, prompts, 4)
        warm = time.perf_counter() - begin
        first = min(seconds(engine, prompts, 1) for _ in range(3))
        times = [(seconds(engine, prompts, args.outputs) - first) / (args.outputs - 1) for _ in range(3)]
        row = {"batch": batch, "ms": min(times) * 1e3, "all_ms": [t * 1e3 for t in times], "first_ms": first * 1e3}
        row |= {"eager": engine.eager, "warm_s": warm}
        print(row, flush=True)
        if args.profile:
            row["step"] = profile(engine, prompts)
        rows.append(row)
        del engine
    if args.long:
        engine = Engine(model, slots=1, pages=pages, chunk=args.long)
        prompt = torch.randint(1000, 200000, (1, args.long), generator=generator).tolist()
        seconds(engine, prompt, 1)
        row = {"prefill": args.long, "ms": min(seconds(engine, prompt, 1) for _ in range(3)) * 1e3}
        print(row, flush=True)
        if args.profile:
            with profiler(activities=[ProfilerActivity.CUDA]) as found:
                seconds(engine, prompt, 1)
            row["step"] = by_kernel(found, 1)
        rows.append(row)
    if args.out:
        facts = {name: runtime.device.value(name) for name in ("name", "arch", "driver", "cuda", "torch", "triton")}
        args.out.write_text(
            json.dumps({"schema": "hal.bench.e2e/1", "model": args.model, **facts, "rows": rows}, indent=1)
        )


def profile(engine: Engine, prompts: list[list[int]], steps: int = 8) -> dict[str, Any]:
    """What the kernels of a decode step take."""
    for prompt in prompts:
        engine.add(Request(prompt, steps + 4))
    while any(s.done == 0 for s in engine._running) or not engine._running:
        engine.step()
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
    while engine._running:
        engine.step()
    # one of the steps may have been under way already
    return by_kernel(found, next(e.count for e in found.key_averages() if "embed" in e.key))


def by_kernel(found: profiler, steps: int) -> dict[str, Any]:
    """Launches and microseconds a step by kernel, the longest first."""
    events = [e for e in found.key_averages() if e.self_device_time_total]
    kernels = [
        {"kernel": e.key[:90], "launches": e.count / steps, "us": e.self_device_time_total / steps} for e in events
    ]
    kernels.sort(key=lambda k: -k["us"])
    total = {name: sum(k[name] for k in kernels) for name in ("launches", "us")}
    print(f"  {total['us']:8.1f} us in {total['launches']:.0f} launches")
    for k in kernels[:16]:
        print(f"  {k['us']:8.1f} us {k['launches']:5.0f}  {k['kernel']}")
    return {**total, "kernels": kernels}


if __name__ == "__main__":
    main()
