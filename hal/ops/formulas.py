"""The formulas that references share, written on tensors of any precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hal.formats import Encoded, Quantized

if TYPE_CHECKING:
    import torch

    from hal.batch import Batch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last axis."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + offset)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``."""
    return x * x.sigmoid()


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)``: the epsilon stands inside the root, beside the sum."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))``, and x itself above 20."""
    import torch

    return torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))


def descending(values: torch.Tensor) -> list[int]:
    """Places of the values, the largest first; of equal ones the lower place first."""
    numbers = values.tolist()
    return sorted(range(len(numbers)), key=lambda place: (-numbers[place], place))


def sequences(batch: Batch) -> Iterator[tuple[int, int, int, int, int]]:
    """For each sequence of a batch: its index, slot, context, first row, last row + 1."""
    row, host = 0, batch.host
    for index, (slot, context, length) in enumerate(zip(host.slots, host.contexts, host.lengths, strict=True)):
        yield index, slot, context, row, row + length
        row += length


def moving(batch: Batch) -> Iterator[tuple[int, int, int, int, int]]:
    """The same for those that move something: padding and sequences of no tokens are left out."""
    return (each for each in sequences(batch) if each[1] >= 0 and each[3] < each[4])


def encode(x: torch.Tensor, form: Quantized, scale: torch.Tensor) -> Encoded:
    """Elements ``x / scale``, saturated at the format's limit, rounded to nearest even."""
    import torch

    narrow = (x / scale.to(x.dtype)).clamp(-form.limit, form.limit)
    return Encoded(narrow.to(torch.float32).to(getattr(torch, form.value)), scale)


def decode(x: Encoded, like: torch.dtype) -> torch.Tensor:
    """The real values behind narrow elements."""
    value: torch.Tensor = x.value.to(like) * x.scale.to(like)
    return value
