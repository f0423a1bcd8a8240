"""One rank of a tensor-parallel run: ``python tests/ranks.py RANK WORLD STORE FOLDER WAY``, tokens as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(rank: int, world: int, store: str, folder: str, way: str) -> None:
    import torch
    import torch.distributed as dist
    from hal_models.engine import Engine, Request
    from stepping import model_of

    from hal.comm import Ranks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    deny = ["InProj=torch.packed"] if way == "differ" and rank == 1 else []
    model = model_of(Path(folder), comm=Ranks(), deny=deny)
    vocab = model.cfg.vocab
    prompts = [[(7 * i + 3 * n) % min(vocab, 120) for i in range(n)] for n in (3, 21, 40)]
    if way == "text":
        prompts = [list(b"12+34="), list(b"sort 5310>"), list(b"rev abcd>")]
    tokens = Engine(model, slots=3, pages=64).generate([Request(p, 12) for p in prompts])
    print(json.dumps(tokens))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
