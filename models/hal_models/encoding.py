"""A weight as a scheme holds it: codes and scales, as files have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.formats import Quantized
from hal.ops.formulas import LEAST_SCALE, block_amax, narrowed, power_scale, scale_values, spread

if TYPE_CHECKING:
    import torch


def encoded(weight: torch.Tensor, form: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[rows, columns]``, packed where two fit a byte, and scales: ``[rows, 1]``, ``[]``, or of each block.

    A scale is ``max |w| / limit`` of what it covers, in float32, or a power of two, as ``power_scale`` rounds it;
    codes are rounded to nearest even.
    """
    rows, columns = weight.shape
    wide, per = weight.float(), form.scale.per
    most = block_amax(wide, form.scale.block or {"channel": (1, columns), "tensor": (rows, columns)}[per])
    if form.scale.dtype == "float8_e8m0fnu":
        scale = power_scale(most)
    else:
        scale = (most.double() / form.limit).float().clamp(min=LEAST_SCALE)
    values = scale_values(scale, form.scale).float()
    each = spread(values, form.scale, rows, columns) if form.scale.block else values
    narrow = narrowed((wide / each).clamp(-form.limit, form.limit), form)
    return narrow, scale.reshape(()) if per == "tensor" else scale
