"""A rank of a whole model on AMD's path, aiter doubled.

``python tests/emulated.py RANK WORLD STORE FOLDER COUNT [DEVICE]`` prints as JSON the texts of the first COUNT lines
(of the COUNT shortest with Triton's kernels interpreted, where TRITON_INTERPRET is set; where COUNT is 0 the logits
after given tokens, prefilled and one by one), the kernels chosen, and the calls of the double.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import hal_rocm
import hal_torch
import hal_triton

import hal
import hal.composed
from hal.registry import Registry

HERE = Path(__file__).parent
INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))

if TYPE_CHECKING:
    from hal_models.qwen3_5.model import Qwen35


def registry() -> Registry:
    """AMD's kernels over the plain ones, and Triton's where they are interpreted: they need that or a GPU."""
    portable = [hal_triton.backend] if INTERPRETED else []
    return Registry.of(hal.composed.backend, hal_torch.backend, *portable, hal_rocm.backend)


def asked(count: int) -> list[int]:
    """Numbers of the lines that are asked: the first, or where that takes long the shortest."""
    from hal_models.tasks import lines

    sizes = [len(p) + len(a) for _, p, a in lines(7, 1000)]
    return sorted(range(1000), key=lambda i: (sizes[i], i))[:count] if INTERPRETED else list(range(count))


def texts(model: Qwen35, count: int) -> list[str]:
    """What it answers to so many lines."""
    from hal_models.engine import Engine, Request
    from hal_models.tasks import lines

    every = lines(7, 1000)
    requests = [
        Request(p.encode(), len(a) + 8, stops=frozenset((10, 256))) for _, p, a in (every[i] for i in asked(count))
    ]
    found = Engine(model, slots=64, pages=1024, chunk=2048, graphs=False).generate(requests)
    return [bytes(t for t in ids if t < 256).decode(errors="replace") for ids in found]


def logits(model: Qwen35) -> list[list[float]]:
    """After each token of three sequences, of which the last eight come one by one."""
    from stepping import Feed

    found = []
    for n in (3, 21, 40):
        feed, ids = Feed(model, n + 8), [(7 * i + 3 * n) % model.cfg.vocab for i in range(n + 8)]
        found += [*feed(ids[:n]).tolist(), *(feed([token])[0].tolist() for token in ids[n:])]
    return found


def ranks(world: int, folder: Path, count: int, label: str = "mi300x", timeout: int = 400) -> list[dict[str, Any]]:
    """Texts or logits, kernels and calls of each rank, processes of their own."""
    with TemporaryDirectory() as store:
        command = [sys.executable, str(HERE / "emulated.py")]
        asked = [f"{store}/store", str(folder), str(count), label]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        started = [
            subprocess.Popen([*command, str(rank), str(world), *asked], stdout=subprocess.PIPE, text=True, env=env)
            for rank in range(world)
        ]
        outputs = [process.communicate(timeout=timeout)[0] for process in started]
    assert [process.returncode for process in started] == [0] * world
    return [json.loads(out.splitlines()[-1]) for out in outputs]


def main(rank: int, world: int, store: str, folder: Path, count: int, label: str = "mi300x") -> None:
    import fake_aiter
    import torch
    import torch.distributed as dist
    from hal_models.qwen3_5.config import configure
    from hal_models.qwen3_5.model import Qwen35
    from hal_models.qwen3_5.weights import load

    from hal.comm import Ranks

    torch.set_num_threads(1)
    if INTERPRETED:
        import interpreted

        interpreted.install()
        interpreted.check()
    calls = fake_aiter.install()
    comm = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        comm = Ranks()
    facts = hal.load_device(label).replaced(fla_core=None)  # the chunked rule is another project's
    runtime = hal.Runtime(facts, hal.Policy(), registry(), place="cpu", comm=comm)
    model = Qwen35(configure(str(folder)).typed("bfloat16"), runtime)
    load(model, folder)
    said = {"texts": texts(model, count)} if count else {"logits": logits(model)}
    chosen = {piece.kernel.name for group in runtime.groups for _, c in group.walk() for piece in c.pieces}
    print(json.dumps({**said, "chosen": sorted(chosen), "calls": calls}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
