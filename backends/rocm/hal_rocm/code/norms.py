"""aiter's norms behind our contracts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.kernel import Site

Call = Callable[..., Any]
Pair = tuple[Tensor, Tensor]


def rms_norm(site: Site) -> Call:
    from aiter.ops.rmsnorm import rmsnorm

    weight, eps, gemma = site.weight("norm"), site.op.eps, site.op.offset == 1.0

    def run(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.shape[0]:
            rmsnorm(out=out, input=x, weight=weight, epsilon=eps, gemma_norm=gemma)
        return out

    return run


def add_rms_norm(site: Site) -> Call:
    from aiter.ops.rmsnorm import rmsnorm2d_fwd_with_add

    weight, eps, gemma = site.weight("norm"), site.op.eps, site.op.offset == 1.0

    def run(partial: Tensor, residual: Tensor) -> Pair:
        out, after = torch.empty_like(residual), torch.empty_like(residual)
        if residual.shape[0]:
            rmsnorm2d_fwd_with_add(
                out=out, input=partial, residual_in=residual, residual_out=after, weight=weight, epsilon=eps,
                gemma_norm=gemma,
            )  # fmt: skip
        return out, after

    return run


def reduce_add_rms_norm(site: Site) -> Call:
    from aiter.dist.communication_op import tensor_model_parallel_fused_allreduce_rmsnorm

    weight, eps, gemma = site.weight("norm"), site.op.eps, site.op.offset == 1.0
    join(site.runtime.rank, site.op.world)

    def run(partial: Tensor, residual: Tensor) -> Pair:
        if not residual.shape[0]:
            return torch.empty_like(residual), torch.empty_like(residual)
        out, after = tensor_model_parallel_fused_allreduce_rmsnorm(
            input_=partial, residual_inp_=residual, weight_=weight, eps=eps, gemma_norm=gemma
        )
        return out, after

    return run


def join(rank: int, world: int) -> None:
    """aiter's own group of all ranks: made once a process, and checked to be of this size again."""
    from aiter.dist.parallel_state import ensure_model_parallel_initialized, init_distributed_environment

    local = int(os.environ.get("LOCAL_RANK", rank))
    init_distributed_environment(world_size=world, rank=rank, distributed_init_method="env://", local_rank=local)
    ensure_model_parallel_initialized(tensor_model_parallel_size=world, pipeline_model_parallel_size=1)
