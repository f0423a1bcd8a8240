"""Other libraries' kernels for the same work, where they are installed: timed beside ours, used by nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

Calls = list[Callable[[], Any]]


def delta_updates(
    op: Any, inputs: list[Any], batches: list[Any], delta: Tensor, small: dict[str, Tensor]
) -> dict[str, Calls]:
    """By name, a call for each step: FlashInfer's update of the delta state alone (no convolution, no norm)."""
    found: dict[str, Calls] = {}
    if find_spec("flashinfer") is None:
        return found
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as update

    a_log, dt_bias = small["A_log"], small["dt_bias"].float()

    def call(projected: Any, batch: Any) -> Callable[[], Any]:
        _, _, b, a = projected
        rows = b.shape[0]
        q, k = (torch.randn(rows, 1, op.key_heads, op.key_head_dim, device="cuda", dtype=b.dtype) for _ in range(2))
        v = torch.randn(rows, 1, op.value_heads, op.value_head_dim, device="cuda", dtype=b.dtype)
        out, slots = torch.empty_like(v), batch.slots.clone()
        a, b = (x.reshape(rows, 1, op.value_heads).contiguous() for x in (a, b))
        return lambda: update(
            q, k, v, None, a_log, a, dt_bias, b, output=out, use_qk_l2norm=True, initial_state=delta,
            initial_state_indices=slots,
        )  # fmt: skip

    found["flashinfer, update alone"] = [call(p, batch) for p, batch in zip(inputs, batches, strict=True)]
    return found
