"""fp8 by rows on AMD's path with aiter doubled, on every line: ``python tests/emulated_lines.py [--write]``.

Each tiny checkpoint, quantized, on the facts of an MI300X: 1000 lines on one rank, 100 on two. Prints, and with
--write keeps in ``emulated-fp8_channel.json``, which lines are not answered as transformers does in float32 without
rounding, and the distance between its two best logits there. It takes minutes: the tests ask a few lines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from emulated import HERE, ranks

from hal.cli import main

FILE = HERE / "emulated-fp8_channel.json"


def run(folder: Path, name: str, device: str, world: int) -> dict[str, Any]:
    """The record of one checkpoint on one device; raises where ranks do not agree."""
    count = 1000 if world == 1 else 100
    found = ranks(world, folder, count, device, timeout=3000)
    assert all(rank["texts"] == found[0]["texts"] for rank in found)
    assert "rocm.packed_a8w8" in found[0]["chosen"]
    theirs = json.loads((HERE / f"answers-{name}.json").read_text())["lines"]
    differ = {i: theirs[i]["margin"] for i, text in enumerate(found[0]["texts"]) if text != theirs[i]["text"]}
    return {"checkpoint": name, "device": device, "ranks": world, "lines": count, "differ": differ}


if __name__ == "__main__":
    rows = []
    with TemporaryDirectory() as out:
        for name in ("dense", "moe"):
            asked = [f"tiny-{name}", "--scheme", "fp8_channel", "--out", f"{out}/{name}"]
            assert main(["quantize", *asked]) == 0
            for world in (1, 2):
                rows.append(run(Path(out) / name, name, "mi300x", world))
                print(json.dumps(rows[-1]), flush=True)
    if "--write" in sys.argv:
        text = ",\n".join(map(json.dumps, rows))
        FILE.write_text(f'{{"torch": "{torch.__version__}", "runs": [\n{text}\n]}}\n')
