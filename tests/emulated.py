"""A rank of a whole model on AMD's path, aiter doubled: ``python tests/emulated.py RANK WORLD STORE FOLDER COUNT``.

Prints texts of the first COUNT lines, the kernels chosen, and the calls of the double, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hal_rocm
import hal_torch

import hal
import hal.composed
from hal.registry import Registry


def registry() -> Registry:
    """AMD's kernels over the plain ones: Triton's need a GPU or its interpreter."""
    found = Registry()
    for backend in (hal.composed.backend, hal_torch.backend, hal_rocm.backend):
        found.add_backend(backend)
    return found


def main(rank: int, world: int, store: str, folder: Path, count: int) -> None:
    import fake_aiter
    import torch
    import torch.distributed as dist
    from hal_models.engine import Engine, Request
    from hal_models.qwen3_5.config import configure
    from hal_models.qwen3_5.model import Qwen35
    from hal_models.qwen3_5.weights import load
    from hal_models.tasks import lines

    from hal.comm import Ranks

    torch.set_num_threads(1)
    calls = fake_aiter.install()
    comm = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        comm = Ranks()
    runtime = hal.Runtime(hal.load_device("mi300x"), hal.Policy(), registry(), place="cpu", comm=comm)
    model = Qwen35(configure(str(folder)).typed("bfloat16"), runtime)
    load(model, folder)
    requests = [Request(p.encode(), len(a) + 8, stops=frozenset((10, 256))) for _, p, a in lines(7, 1000)[:count]]
    found = Engine(model, slots=64, pages=1024, chunk=2048, graphs=False).generate(requests)
    texts = [bytes(t for t in ids if t < 256).decode(errors="replace") for ids in found]
    chosen = {piece.kernel.name for group in runtime.groups for _, c in group.walk() for piece in c.pieces}
    print(json.dumps({"texts": texts, "chosen": sorted(chosen), "calls": calls}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
