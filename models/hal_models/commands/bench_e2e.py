"""``hal bench e2e``: decode steps and a long prefill of a whole model through the engine, ids read each step."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.cli.common import need_file, positives
from hal.errors import HalError
from hal_models import PAGE_SIZE

if TYPE_CHECKING:
    from hal_models.engine import Engine

SCHEMA = "hal.bench.e2e/1"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("--model", default="qwen3.5-4b", metavar="NAME", help="a published name; weights are made up")
    parser.add_argument("--batches", type=positives, default=(1, 16, 64, 128), metavar="N,...", help="1,16,64,128")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="tokens of each prompt (128)")
    parser.add_argument("--outputs", type=int, default=128, metavar="N", help="tokens of each answer (128)")
    parser.add_argument(
        "--long", type=int, default=8192, metavar="N", help="tokens of one long prefill (8192; 0: none)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="compute in this dtype")
    parser.add_argument("--draft", type=int, default=0, metavar="N", help="verify N drafted tokens a step (0: none)")
    parser.add_argument(
        "--accept",
        type=int,
        default=0,
        metavar="N",
        help="say that N rows of each verify step stand (0: those that do)",
    )
    parser.add_argument("--profile", action="store_true", help="what the kernels of a step take, each")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here too")
    parser.add_argument("--json", action="store_true", help="print JSON, see docs/json.md")


def run(args: argparse.Namespace) -> int:
    """Time, print; 0. Progress goes to standard error."""
    import torch

    from hal.policy import Policy
    from hal.runtime import Runtime
    from hal_models.made_up import fill
    from hal_models.qwen3_5.config import configure
    from hal_models.qwen3_5.model import Qwen35

    for name, least in (("prompt", 1), ("outputs", 2)):
        if getattr(args, name) < least:
            raise HalError(f"--{name} is {least} or more, got {getattr(args, name)}")
    if args.accept and not 1 <= args.accept <= args.draft + 1:
        raise HalError(f"--accept is 1 to {args.draft + 1}, a step's rows with --draft {args.draft}; got {args.accept}")
    need_file("--out", args.out)
    runtime = Runtime(policy=Policy.from_environment())
    model = Qwen35(configure(args.model).typed(args.dtype), runtime, args.draft)
    fill(model)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for batch in args.batches:
        rows.append(decode(model, batch, args, generator))
        print(f"batch {batch}: {rows[-1]['ms']:.3f} ms a step{_drafts(rows[-1])}", file=sys.stderr, flush=True)
    if args.long:
        rows.append(prefill(model, args, generator))
        print(f"prefill of {args.long}: {rows[-1]['ms']:.1f} ms", file=sys.stderr, flush=True)
    facts = runtime.device.known()
    answer = {"schema": SCHEMA, "model": args.model, "device": runtime.device.label, "facts": facts, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(answer, indent=1) + "\n")
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        _print(rows)
    return 0


def _prompts(model: Any, count: int, length: int, generator: Any) -> list[list[int]]:
    import torch

    most = model.cfg.vocab
    return torch.randint(min(1000, most // 2), most, (count, length), generator=generator).tolist()


def seconds(engine: Engine, prompts: list[list[int]], outputs: int) -> float:
    """Of answering all prompts at once."""
    from hal_models.engine import Request

    start = time.perf_counter()
    engine.generate([Request(p, outputs) for p in prompts])
    return time.perf_counter() - start


def decode(model: Any, batch: int, args: argparse.Namespace, generator: Any) -> dict[str, Any]:
    """(t[n outputs] - t[1 output]) over the steps between, the least of three."""
    from hal_models.drafted import room
    from hal_models.engine import Engine

    pages = -(-(args.prompt + args.outputs + room(model)) // PAGE_SIZE) + 1
    engine = Engine(model, slots=batch, pages=batch * pages, chunk=8192, accept=args.accept)
    prompts = _prompts(model, batch, args.prompt, generator)
    warm = seconds(engine, prompts, min(4, args.outputs))
    first = min(seconds(engine, prompts, 1) for _ in range(3))
    verified = engine.verified
    seconds(engine, prompts, args.outputs)
    steps = (engine.verified - verified) / batch if args.draft else args.outputs - 1
    times = [(seconds(engine, prompts, args.outputs) - first) / steps for _ in range(3)]
    row = {"batch": batch, "ms": min(times) * 1e3, "all_ms": [t * 1e3 for t in times], "first_ms": first * 1e3}
    row |= {"eager": engine.eager, "warm_s": warm}
    if args.draft:
        rate = batch * (args.outputs - 1) / (min(times) * steps)
        row |= {"draft": args.draft, "acceptance": engine.acceptance, "tokens_s": rate}
    if args.profile:
        row["step"] = _profiled_steps(engine, prompts)
    return row


def prefill(model: Any, args: argparse.Namespace, generator: Any) -> dict[str, Any]:
    """From one long prompt to its first token, the least of three."""
    from hal_models.engine import Engine

    engine = Engine(model, slots=1, pages=args.long // PAGE_SIZE + 3, chunk=args.long)
    prompt = _prompts(model, 1, args.long, generator)
    seconds(engine, prompt, 1)
    row: dict[str, Any] = {"prefill": args.long, "ms": min(seconds(engine, prompt, 1) for _ in range(3)) * 1e3}
    if args.profile:
        with _profiler() as found:
            seconds(engine, prompt, 1)
        row["step"] = _by_kernel(found, 1)
    return row


def _profiler() -> Any:
    """Records what devices run, not the host; nothing where there is no device."""
    from contextlib import nullcontext

    from torch.profiler import ProfilerActivity, profile, supported_activities

    devices = set(supported_activities()) - {ProfilerActivity.CPU}
    return profile(activities=devices) if devices else nullcontext()


def _profiled_steps(engine: Engine, prompts: list[list[int]], steps: int = 8) -> dict[str, Any]:
    """What the kernels of a decode step take."""
    from hal_models.engine import Request

    for prompt in prompts:
        engine.add(Request(prompt, steps + 4))
    while any(s.done == 0 for s in engine._running) or not engine._running:
        engine.step()
    with _profiler() as found:
        for _ in range(steps):
            engine.step()
    while engine._running:
        engine.step()
    return _by_kernel(found, steps)


def _by_kernel(found: Any, steps: int) -> dict[str, Any]:
    """Launches and microseconds a step by kernel, the longest first; nothing where no device ran."""
    events = [e for e in found.key_averages() if e.self_device_time_total] if found else []
    # a step may have been under way already
    steps = max([steps, *(e.count for e in events if "embed" in e.key)])
    kernels = [
        {"kernel": e.key[:90], "launches": e.count / steps, "us": e.self_device_time_total / steps} for e in events
    ]
    kernels.sort(key=lambda k: -k["us"])
    return {**{name: sum(k[name] for k in kernels) for name in ("launches", "us")}, "kernels": kernels}


def _drafts(row: dict[str, Any]) -> str:
    """What drafts gave, in words."""
    if "draft" not in row:
        return ""
    return f", acceptance length {row['acceptance']:.2f}, {row['tokens_s']:.1f} tokens/s"


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        what = f"batch {row['batch']}, a step" if "batch" in row else f"prefill of {row['prefill']}"
        print(f"{what}: {row['ms']:.3f} ms{_drafts(row)}" + (f" (eager: {row['eager']})" if row.get("eager") else ""))
        step = row.get("step", {})
        if step.get("kernels"):
            print(f"  {step['us']:8.1f} us in {step['launches']:.0f} launches")
        for k in step.get("kernels", [])[:16]:
            print(f"  {k['us']:8.1f} us {k['launches']:5.0f}  {k['kernel']}")
