"""The in-projection over the eight models, ranks and rows: is the kernel that is chosen the fastest?

``PYTHONPATH=.:backends/torch:backends/triton:backends/cuda:models python bench/in_proj.py [seconds [model ...]]``;
needs a GPU. Every kernel that can run a problem is timed twice, in two passes over all problems. The first pass says
which is the fastest, the second judges: ``share`` is the chosen one's time over that one's, ``behind`` the
difference in microseconds, both of the second pass. $OUT/in-proj.json has all times.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hal_models.qwen3_5.published import PUBLISHED

from hal.bench import microseconds, problem
from hal.cli.decisions import decisions
from hal.cli.models import build
from hal.errors import HalError
from hal.ops import InProj
from hal.registry import Registry
from hal.runtime import Runtime

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RANKS = (1, 2, 4, 8)
LIMIT = float(sys.argv[1]) if len(sys.argv) > 1 else 500.0
START = time.perf_counter()


def problems(like: Runtime) -> dict[InProj, list[str]]:
    """The in-projections of one rank, each once, and what has them."""
    from dataclasses import replace

    found: dict[InProj, list[str]] = {}
    for name in sys.argv[2:] or PUBLISHED:
        for world in RANKS:
            plan = Runtime(like.device, like.policy, like.registry, load=False, world=world)
            try:
                build(name, plan)
            except HalError as error:
                print(f"{name} over {world}: {error}", flush=True)
                continue
            for decision in decisions(plan, InProj):
                names = found.setdefault(replace(decision.choice.op, world=1), [])
                if f"{name}/{world}" not in names:
                    names.append(f"{name}/{world}")
    return found


def times(runtime: Runtime, op: InProj, rows: int) -> dict[str, float]:
    """Microseconds of every kernel that can."""
    found = {}
    for kernel in runtime.registry.names(InProj):
        if kernel in ("torch.separate", "torch.padded"):
            continue  # checks and steps of others, never the fastest
        try:
            given = problem(runtime, op, kernel, rows)
        except HalError:
            continue
        found[kernel] = round(microseconds(runtime, given.calls), 3)
        del given
    return found


def main() -> None:
    runtime = Runtime(registry=Registry.installed())
    work = problems(runtime)
    print(f"{len(work)} problems of {sum(map(len, work.values()))} models and ranks", flush=True)
    found: list[dict[str, Any]] = []
    for again in (False, True):
        for op, names in work.items():
            if time.perf_counter() - START > LIMIT:
                print("no time left", flush=True)
                break
            (choice,) = runtime.resolver.resolve((op,))
            widths = list(op.outputs().values())
            for rows in ROWS:
                chosen, taken = choice.at(rows).kernel.name, times(runtime, op, rows)
                key = {"of": names, "hidden": op.hidden, "width": sum(widths), "rows": rows}
                if not again:
                    found.append({**key, "chosen": chosen, "first": taken})
                    continue
                row = next(r for r in found if all(r[k] == key[k] for k in key))
                best = min(row["first"], key=row["first"].__getitem__)
                row |= {"second": taken, "fastest": best, "share": taken[chosen] / taken[best]}
                row["behind"] = taken[chosen] - taken[best]
            torch.cuda.empty_cache()
        Path(os.environ.get("OUT", "."), "in-proj.json").write_text(json.dumps({
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "facts": runtime.device.known(),
            "results": found,
        }, indent=1))  # fmt: skip
    judged = [r for r in found if "second" in r]
    missed = [r for r in judged if r["share"] > 1.02 and r["behind"] > 0.15]
    print(f"{len(judged)} judged, {len(missed)} chosen ones are slower by more than 2 % and 0.15 us")
    for r in sorted(missed, key=lambda r: -r["share"]):
        print(f"  {r['share']:.3f} {r['behind']:6.2f} us  {r['of'][0]} width {r['width']} rows {r['rows']}: "
              f"{r['chosen']} {r['second'][r['chosen']]} {r['fastest']} {r['second'][r['fastest']]}")  # fmt: skip
    for r in judged:
        if r["width"] % 8 and "cuda.pair_overlapped" in r["second"]:
            share = r["second"]["cuda.packed"] / r["second"]["cuda.pair_overlapped"]
            print(f"  unaligned {r['of'][0]} rows {r['rows']}: packed is {share:.2f} of the overlapped pair")
    print(f"{time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
