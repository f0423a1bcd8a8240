"""Feeds one sequence to a model in pieces of given lengths; what tests of splits and of the oracle share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hal_models import PAGE_SIZE
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import Qwen35
from hal_models.qwen3_5.weights import load

import hal
from hal.layout import StateLayout

SLOT = 2


def model_of(folder: Path, dtype: str | None = "float32", comm: Any = None, draft: int = 0, **policy: Any) -> Qwen35:
    """A checkpoint on the CPU's plain kernels, with its weights."""
    runtime = hal.Runtime(hal.load_device("cpu"), hal.Policy.of(**policy), comm=comm)
    model = Qwen35(configure(str(folder)).typed(dtype), runtime, draft)
    load(model, folder)
    return model


class Feed:
    """One sequence in slot 2 of pools that are poisoned elsewhere, and there too before it starts."""

    def __init__(self, model: Qwen35, most: int) -> None:
        self.model, self.seen = model, 0
        self.pages = list(range(-(-most // PAGE_SIZE)))[::-1]
        self.state = model.new_state(SLOT + 2, len(self.pages) + 1)
        for pools in self.state:
            for pool in pools:
                pool.fill_(float("nan"))

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int], mode: str = "") -> torch.Tensor:
        """Logits ``[tokens, vocab]`` of the next tokens of the sequence."""
        mode = mode or ("prefill" if len(ids) > 1 or not self.seen else "decode")
        batch = hal.make_batch(mode, [len(ids)], [self.seen], [SLOT], pages=[self.pages], page_size=PAGE_SIZE)
        self.model.runtime.begin(batch)
        self.seen += len(ids)
        logits, _ = self.model.head(*self.model(torch.tensor(list(ids)), self.state, batch))
        return logits

    def states(self) -> list[torch.Tensor]:
        """The sequence's states in canonical order; keys and values in order of tokens."""
        found = []
        for layer, pools in zip(self.model.layers, self.state, strict=True):
            group = layer.mixer.state
            for (name, state), pool in zip(group.states().items(), pools, strict=True):
                layout = group.layouts[name]
                assert isinstance(layout, StateLayout)
                if name == "kv":
                    pages = pool[self.pages].transpose(0, 1).flatten(1, 2)
                    found.append(pages[:, : self.seen])
                else:
                    found.append(layout.read(pool, state, [self.seen] * pool.shape[0])[SLOT])
        return found
