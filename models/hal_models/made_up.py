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
                made = torch.empty(part.shape, dtype=kind, device=place)
                storage.put(part.name, made.normal_(mean, min(deviation, 1.0), generator=generator))
    runtime.seal()
