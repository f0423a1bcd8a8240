"""Weights in the order that AMD's matrix instructions load: aiter's ``shuffle_weight`` with (16, 16)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.layout import Layout, Padded, Param, ParamLayout

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


@dataclass(frozen=True)
class Codes(Padded):
    """OCP's e4m3 codes of all parts, then rows of zeros; shuffled, and as fnuz means them, when all of it is there.

    A byte as fnuz has half its value (its scale is then doubled), and 0x80, OCP's -0, is NaN: it becomes 0.
    """

    shuffle: bool = False
    fnuz: bool = False
    label: ClassVar[str] = "codes"

    def __str__(self) -> str:
        kind = "fnuz" if self.fnuz else "ocp"
        return f"{kind}:{self.multiple}" + (" shuffled:16x16" if self.shuffle else "")

    @property
    def kind(self) -> str:
        """The dtype that the bytes are read as."""
        return "float8_e4m3fnuz" if self.fnuz else "float8_e4m3fn"

    def reads_as(self, wanted: Layout) -> bool:
        return self == wanted

    def seal(self, buffers: Mapping[str, torch.Tensor], parts: Sequence[Param]) -> None:
        import torch

        super().seal(buffers, parts)
        (whole,) = buffers.values()
        if self.fnuz:
            codes = whole.view(torch.uint8)
            codes.masked_fill_(codes == 0x80, 0)
        if self.shuffle:
            whole.copy_(shuffled(whole))


@dataclass(frozen=True)
class RowScales(Padded):
    """Scales of rows, then ones for the rows of padding; doubled for codes that are read as fnuz."""

    doubled: bool = False
    label: ClassVar[str] = "scales"

    def __str__(self) -> str:
        return f"scales:{self.multiple}" + (" doubled" if self.doubled else "")

    def reads_as(self, wanted: Layout) -> bool:
        return self == wanted

    def seal(self, buffers: Mapping[str, torch.Tensor], parts: Sequence[Param]) -> None:
        (whole,) = buffers.values()
        if self.doubled:
            whole.mul_(2)
        whole[sum(p.rows for p in parts) :].fill_(1)
