"""The formulas that references share, written on tensors of any precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hal.formats import Encoded, Quantized, Scale, Scheme

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


LEAST_SCALE = 2.0**-126  # of a dynamic scale: below, float32 may be flushed to zero, and zero over zero is none


def encode(x: torch.Tensor, form: Quantized, scale: torch.Tensor | None = None) -> Encoded:
    """Elements ``x / scale``, saturated at the format's limit, rounded to nearest even.

    A dynamic scale is ``max |x| / limit`` of what it covers, in float32.
    """
    import torch

    if not form.scale.static:
        scale = dynamic_scale(x, form)
    assert scale is not None
    wide = spread(scale.to(x.dtype), form.scale, *x.shape)
    narrow = (x / wide).clamp(-form.limit, form.limit)
    return Encoded(narrow.to(torch.float32).to(getattr(torch, form.value)), scale)


def dynamic_scale(x: torch.Tensor, form: Quantized) -> torch.Tensor:
    """The scale of each row, or of each block of a row, of ``x [rows, columns]``."""
    import torch

    rows, columns = x.shape
    size = form.scale.block[1] if form.scale.block else max(1, columns)
    padded = torch.nn.functional.pad(x.abs(), (0, -columns % size))
    most = padded.unflatten(1, (-1, size)).amax(-1) if rows else x.new_zeros(form.scale.shape(rows, columns))
    return (most.double() / form.limit).float().clamp(min=LEAST_SCALE)


def spread(scale: torch.Tensor, form: Scale, rows: int, columns: int) -> torch.Tensor:
    """A scale of each element of a matrix ``[rows, columns]``, or what broadcasts to that."""
    if form.block:
        scale = scale.repeat_interleave(form.block[0], -2)[..., :rows, :]
        return scale.repeat_interleave(form.block[1], -1)[..., :columns]
    return scale[..., None] if form.per == "channel" else scale


def decode(x: Encoded, like: torch.dtype, form: Scale | None = None) -> torch.Tensor:
    """The real values behind narrow elements; ``form`` says what a scale covers where that is a block."""
    scale = x.scale.to(like)
    value: torch.Tensor = x.value.to(like) * (spread(scale, form, *x.value.shape[-2:]) if form else scale)
    return value


def weight_of(params: Mapping[str, torch.Tensor], name: str, scheme: Scheme | None) -> torch.Tensor:
    """The real values of a weight among an op's parameters; experts on a leading axis."""
    weight = params[name]
    if scheme is None:
        return weight
    return weight * spread(params[f"{name}_scale"], scheme.weight.scale, *weight.shape[-2:])
