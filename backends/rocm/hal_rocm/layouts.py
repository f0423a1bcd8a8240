"""Weights in the order that AMD's matrix instructions load: aiter's ``shuffle_weight`` with (16, 16)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.layout import Param, ParamLayout

if TYPE_CHECKING:
    import torch

ROWS = 16
TWICE = 32  # elements along K that lie together, whatever their width
VECTOR_BYTES = 16


def shuffled(weight: torch.Tensor) -> torch.Tensor:
    """``[..., N, K]`` with each tile of 16 rows and 32 columns laid out as vectors of 16 bytes; N and K stay.

    Not idempotent: what is shuffled twice is wrong.
    """
    n, k = weight.shape[-2:]
    if n % ROWS or k % TWICE:
        raise ValueError(f"rows in multiples of {ROWS} and columns of {TWICE} can be shuffled, got {[n, k]}")
    vector = VECTOR_BYTES // weight.element_size()
    tiles = weight.reshape(-1, n // ROWS, ROWS, k // TWICE, TWICE // vector, vector)
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(weight.shape)


@dataclass(frozen=True)
class Shuffled(ParamLayout):
    """One part whose matrices are shuffled when all of it is there; read as nothing else."""

    label: ClassVar[str] = "shuffled:16x16"

    def seal(self, buffers: Mapping[str, torch.Tensor], parts: Sequence[Param]) -> None:
        for whole in buffers.values():
            for matrix in whole.unbind(0) if whole.dim() == 3 else (whole,):
                matrix.copy_(shuffled(matrix))
