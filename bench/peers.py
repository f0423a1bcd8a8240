"""Other libraries' kernels for the same work, where they are installed: timed beside ours, used by nothing.

``PYTHONPATH=bench hal bench RMSNorm --peers peers:peers`` times them on the problems of ``hal bench``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

Calls = list[Callable[[], Any]]


def delta_updates(
    op: Any, inputs: Sequence[Any], batches: Sequence[Any], deltas: Sequence[Tensor], small: Mapping[str, Tensor]
) -> dict[str, Calls]:
    """By name, a call for each step: FlashInfer's update of the delta state alone (no convolution, no norm)."""
    found: dict[str, Calls] = {}
    if find_spec("flashinfer") is None:
        return found
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as update

    # its kernels want addresses that are multiples of 32 bytes
    a_log, dt_bias = small["A_log"].clone(), small["dt_bias"].float()

    def call(projected: Any, batch: Any, delta: Tensor) -> Callable[[], Any]:
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

    found["flashinfer, update alone"] = [call(*step) for step in zip(inputs, batches, deltas, strict=True)]
    return found


def rms_norm(weight: Tensor, eps: float, offset: float) -> Callable[[Tensor], Tensor]:
    """The formula, for torch.compile."""

    def run(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (offset + weight.float())).to(x.dtype)

    return run


def silu_mul(x: Tensor) -> Tensor:
    """The same."""
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def peers(problem: Any) -> dict[str, Calls]:
    """By name, a call for each copy of a problem of ``hal bench``."""
    op, copies = problem.op, range(len(problem.args))
    if op.title() == "GatedDeltaDecode":
        inputs, deltas = [args[0] for args in problem.args], [pools[-1] for pools in problem.states]
        return delta_updates(op, inputs, [problem.batch for _ in copies], deltas, problem.params[0])
    if op.title() == "SiluMul":
        run = torch.compile(silu_mul)
        return {"torch.compile": [partial(run, *args) for args in problem.args]}
    if op.title() == "RMSNorm":
        run = torch.compile(rms_norm(problem.params[0]["norm"], op.eps, op.offset))
        found = {"torch.compile": [partial(run, *args) for args in problem.args]}
        if find_spec("flashinfer") is not None and op.offset == 1:
            from flashinfer.norm import gemma_rmsnorm

            weights = [p["norm"] for p in problem.params]
            found["flashinfer"] = [partial(gemma_rmsnorm, problem.args[i][0], weights[i], op.eps) for i in copies]
        return found
    return {}
