"""Seconds of whole processes: importing hal, and questions that need no torch.

python bench/startup.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

IMPORT = "import time; t = time.perf_counter(); import hal; print(time.perf_counter() - t)"
COMMANDS = {
    "explain, default model": ["explain", "InProj", "--device", "h200"],
    "explain, largest model": ["explain", "MoE", "--device", "mi300x", "--model", "qwen3.5-397b-a17b"],
    "explain, an op of no model": ["explain", "Copy", "--device", "cpu"],
    "plan, largest model": ["plan", "qwen3.5-397b-a17b", "--device", "b200", "--tp", "8"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, list[float]] = {"import hal, in the process": []}
    for _ in range(args.times):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        found["import hal, in the process"].append(float(done.stdout))
    for name, words in COMMANDS.items():
        for _ in range(args.times):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-m", "hal", *words], capture_output=True, check=True)
            found.setdefault(name, []).append(time.perf_counter() - begin)
    rows = {name: {"median_s": statistics.median(t), "worst_s": max(t)} for name, t in found.items()}
    for name, row in rows.items():
        print(f"{row['median_s']:.3f} s  (worst {row['worst_s']:.3f})  {name}")
    if args.out:
        about = {"schema": "hal.bench.startup/1", "python": platform.python_version(), "machine": platform.machine()}
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
