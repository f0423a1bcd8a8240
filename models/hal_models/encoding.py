"""A weight as a scheme holds it: codes and scales, as files have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.formats import Quantized
from hal.ops.formulas import LEAST_SCALE

if TYPE_CHECKING:
    import torch


def encoded(weight: torch.Tensor, form: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[rows, columns]`` and scales of a weight: ``[rows, 1]`` by rows, ``[]`` for all.

    A scale is ``max |w| / limit`` of what it covers, in float32; codes are rounded to nearest even.
    """
    import torch

    most = weight.float().abs()
    most = most.amax(-1, keepdim=True) if form.scale.per == "channel" else most.amax()
    scale = (most.double() / form.limit).float().clamp(min=LEAST_SCALE)
    narrow = (weight.float() / scale).clamp(-form.limit, form.limit)
    return narrow.to(getattr(torch, form.value)), scale
