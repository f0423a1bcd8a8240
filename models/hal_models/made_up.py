"""Made-up weights: for timing a shape without its checkpoint."""

from __future__ import annotations

from typing import Any


def fill(model: Any, seed: int = 0) -> None:
    """Normal values of each parameter's own spread, then seal."""
    import torch

    runtime = model.runtime
    place = runtime.place
    generator = torch.Generator(place).manual_seed(seed)
    done: set[int] = set()
    for group in runtime.groups:
        params = {p.name: p for op in group.members.values() for p in op.params()}
        for storage in group.storages.values():
            if id(storage) in done:
                continue
            done.add(id(storage))
            for part in storage.parts:
                mean, deviation = params[part.name].init
                kind = getattr(torch, part.dtype)
                narrow = kind.itemsize == 1
                made = torch.empty(part.shape, dtype=torch.float32 if narrow else kind, device=place)
                made.normal_(mean, deviation if narrow else min(deviation, 1.0), generator=generator)
                if kind == torch.uint8:
                    made.round_().clamp_(0, 254)
                storage.put(part.name, made.to(kind))
    runtime.seal()
