"""fla-core's chunked delta rule behind GatedDeltaUpdate's contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.batch import Batch
from hal.kernel import Site

Call = Callable[..., Any]


@dataclass(frozen=True)
class Runs:
    """The sequences that have tokens: fla wants no empty ones."""

    cu_seqlens: Tensor  # [n + 1] int64, on the device
    cu_seqlens_cpu: Tensor
    slots: Tensor  # [n] int64; 0 for padding
    stays: Tensor  # [kept] int64, which of them have a slot
    fresh: Tensor  # [n, 1, 1, 1] bool, state is zero: a first token, or padding


def runs(batch: Batch) -> Runs:
    """The plan of a prefill step."""
    host, place = batch.host, batch.slots.device
    taken = [i for i, length in enumerate(host.lengths) if length]
    ends = torch.tensor([0, *(host.lengths[i] for i in taken)]).cumsum(0)
    slots = [host.slots[i] for i in taken]
    fresh = [slot < 0 or not host.contexts[i] for i, slot in zip(taken, slots, strict=True)]
    stays = [n for n, slot in enumerate(slots) if slot >= 0]
    return Runs(
        ends.to(place),
        ends,
        torch.tensor([max(slot, 0) for slot in slots], dtype=torch.int64, device=place),
        torch.tensor(stays, dtype=torch.int64, device=place),
        torch.tensor(fresh, dtype=torch.bool, device=place)[:, None, None, None],
    )


def chunk(site: Site) -> Call:
    """``[rows, channels]``, b and a ``[rows, value_heads]`` to ``[rows, value_heads, V]``; the pool moves on."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    op, key = site.op, site.planned(runs)
    a_log, dt_bias = site.weight("A_log"), site.weight("dt_bias")
    dims = (op.key_head_dim, op.key_head_dim, op.value_head_dim)

    def run(mixed: tuple[Tensor, ...], b: Tensor, a: Tensor, state: tuple[Tensor], batch: Batch) -> Tensor:
        (pool,) = state
        if not b.shape[0]:
            return b.new_empty(0, op.value_heads, op.value_head_dim)
        plan: Runs = batch.planned(key)
        given = (*mixed, b, a)
        if batch.may_pad:  # with anything, NaN too
            given = tuple(torch.where(batch.padding[:, None], 0, x) for x in given)
        q, k, v = (x.unflatten(1, (-1, n))[None] for x, n in zip(given[:3], dims, strict=True))
        beta, gate = given[3][None].float().sigmoid(), given[4][None]
        out, final = chunk_gated_delta_rule(
            q,
            k,
            v,
            g=gate,
            beta=beta,
            initial_state=torch.where(plan.fresh, 0, pool[plan.slots].float()),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=a_log,
            dt_bias=dt_bias.float(),
            cu_seqlens=plan.cu_seqlens,
            cu_seqlens_cpu=plan.cu_seqlens_cpu,
            state_v_first=True,
        )
        pool[plan.slots[plan.stays]] = final[plan.stays].to(pool.dtype)
        return torch.where(batch.padding[:, None, None], 0, out[0]) if batch.may_pad else out[0]

    return run
