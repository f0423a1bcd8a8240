"""Answers of the tiny checkpoints in every scheme, as rows of docs/quantized.md.

python bench/schemes.py [--lines N] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hal_models.commands.loading import SHIPPED
from hal_models.quantization import MIXES
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import Qwen35
from hal_models.qwen3_5.weights import load
from hal_models.scoring import scored
from hal_models.tasks import lines

import hal
from hal.cli import main as verb
from hal.formats import SCHEMES

SEED, CALIBRATION = 7, 3  # of the lines that are scored, and of those that scales are measured on
ROUNDED = {"as the checkpoint rounds them": "checkpoint", "as they are": "device"}


def quantized(name: str, scheme: str, folder: Path) -> Path:
    out, text = folder / f"{name}-{scheme}", folder / "lines.txt"
    text.write_text("".join(f"{prompt}{answer}\n" for _, prompt, answer in lines(CALIBRATION, 64)))
    with contextlib.redirect_stdout(io.StringIO()):
        argv = ["quantize", f"tiny-{name}", "--scheme", scheme, "--out", str(out), "--calibrate", str(text)]
        assert verb(argv) == 0
    return out


def rows(count: int) -> Iterator[dict[str, object]]:
    wanted = lines(SEED, count)
    with tempfile.TemporaryDirectory() as made:
        for name in ("dense", "moe"):
            for scheme in ("bf16", *SCHEMES, *MIXES):
                folder = SHIPPED / name if scheme == "bf16" else quantized(name, scheme, Path(made))
                for inputs, policy in ROUNDED.items():
                    if policy == "device" and "fp4" not in scheme:
                        continue
                    runtime = hal.Runtime(hal.load_device("cpu"), hal.Policy.of(activations=policy), place="cpu")
                    model = Qwen35(configure(str(folder)), runtime)
                    load(model, folder)
                    found = scored(model, wanted)
                    yield {
                        "checkpoint": f"tiny-{name}", "scheme": scheme,
                        "inputs": "bfloat16" if scheme == "bf16" else inputs,
                        "exact": found.exact, "lines": found.lines, "nats_per_byte": round(found.nll_per_byte, 5),
                        "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
                    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    print("| checkpoint | scheme | inputs | right | nats a byte | MB |\n|---|---|---|---|---|---|")
    for row in rows(args.lines):
        found.append(row)
        right = f"{row['exact']} of {row['lines']}"
        print(
            f"| {row['checkpoint']} | {row['scheme']} | {row['inputs']} | {right} | {row['nats_per_byte']:.5f} "
            f"| {row['bytes'] / 1e6:.1f} |",  # type: ignore[operator]
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps({"schema": "hal.schemes/1", "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
