"""A weight as a scheme holds it: codes and scales, as files have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.formats import Encoded, Quantized, dtype
from hal.ops.formulas import (
    LEAST_SCALE,
    block_amax,
    divided,
    inner_scale,
    narrowed,
    power_scale,
    scale_values,
    spread,
)

if TYPE_CHECKING:
    import torch


def encoded(weight: torch.Tensor, form: Quantized) -> Encoded:
    """Codes ``[rows, columns]``, packed where two fit a byte, and scales: ``[rows, 1]``, ``[]``, or of each block.

    A scale is ``max |w| / limit`` of what it covers, in float32, or a power of two, as ``power_scale`` rounds it;
    under a global scale, as ``fixed_scale`` of the largest number makes it, what ``inner_scale`` says. Codes are
    rounded to nearest even.
    """
    rows, columns = weight.shape
    wide, per, within = weight.float(), form.scale.per, None
    most = block_amax(wide, form.scale.block or {"channel": (1, columns), "tensor": (rows, columns)}[per])
    if form.scale.within:
        within = fixed_scale(most.amax(), form)
        scale = inner_scale(most, form, within)
    elif form.scale.dtype == "float8_e8m0fnu":
        scale = power_scale(most)
    else:
        scale = _share(most, form.limit)
    values = scale_values(scale, form.scale, within).float()
    each = spread(values, form.scale, rows, columns) if form.scale.block else values
    narrow = narrowed(divided(wide, each).clamp(-form.limit, form.limit), form)
    return Encoded(narrow, scale.reshape(()) if per == "tensor" else scale, within)


def fixed_scale(most: torch.Tensor, form: Quantized) -> torch.Tensor:
    """The one scale of numbers up to ``most``: under it all are within the limits of elements and of block scales."""
    return _share(most, form.limit * ((dtype(form.scale.dtype).limit or 1.0) if form.scale.within else 1.0))


def _share(most: torch.Tensor, limit: float) -> torch.Tensor:
    return (most.double() / limit).float().clamp(min=LEAST_SCALE)
