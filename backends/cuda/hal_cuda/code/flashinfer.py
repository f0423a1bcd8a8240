"""FlashInfer behind our contracts: what it wants of alignment, dtypes, gates and plans is met here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hal_triton.code.fla import Runs, runs
from torch import Tensor

from hal.batch import Batch
from hal.kernel import Site

Call = Callable[..., Any]
LINE = 16
WORKSPACE = 128 * 1024 * 1024  # bytes, as FlashInfer recommends
LEAST = torch.finfo(torch.float32).tiny


def aligned(x: Tensor) -> Tensor:
    """``x``, or a dense copy where a row does not begin at a whole load: there kernels fault."""
    size = x.element_size()
    whole = x.data_ptr() % LINE == 0 and all(step * size % LINE == 0 for step in x.stride()[:-1])
    return x if whole else x.clone(memory_format=torch.contiguous_format)


def _norm(site: Site) -> Callable[[Tensor], Tensor]:
    from flashinfer.norm import gemma_rmsnorm, rmsnorm

    # PDL is of our table; FlashInfer would ask the device
    norm, weight, eps = gemma_rmsnorm if site.op.offset else rmsnorm, site.weight("norm"), site.op.eps
    overlaps = site.settings["PDL"]

    def run(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            norm(aligned(x), weight, eps=eps, out=out, enable_pdl=overlaps)
        return out

    return run


def rms_norm(site: Site) -> Call:
    return _norm(site)


def add_rms_norm(site: Site) -> Call:
    norm = _norm(site)

    def run(partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        # in float32, rounded once; the arguments stay the caller's
        residual = residual + partial
        return norm(residual), residual

    return run


def silu_mul(site: Site) -> Call:
    from flashinfer.activation import silu_and_mul

    overlaps = site.settings["PDL"]

    def run(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            # it takes no stride
            silu_and_mul(aligned(x.contiguous()), out=out, enable_pdl=overlaps)
        return out

    return run


@dataclass(frozen=True, eq=False)
class Paged:
    """A prefill step: offsets of rows and of pages, tokens in the last page, on the host; pages on the device.

    ``kept``: rows that belong to sequences, where there are others too.
    """

    planner: Planner
    rows: Tensor
    pages: Tensor
    last: Tensor
    indices: Tensor
    kept: Tensor | None


class Planner:
    """One wrapper for all sites of an op. It holds one plan at a time: a step that is not its last is planned again."""

    def __init__(self, site: Site) -> None:
        self.op, self.settings, self.place = site.op, site.settings, site.runtime.place
        self._wrapper: Any = None
        self._last: Paged | None = None
        self._copied: torch.Event | None = None

    def __call__(self, batch: Batch) -> Paged:
        host, size = batch.host, self.op.page_size
        starts = list(accumulate(host.lengths, initial=0))
        taken = [i for i, (slot, n) in enumerate(zip(host.slots, host.lengths, strict=True)) if slot >= 0 and n]
        totals = [host.kv_lengths[i] for i in taken]
        counts = [-(-total // size) for total in totals]
        width = batch.page_table.shape[1]
        place = batch.page_table.device

        def joined(ranges: list[Tensor]) -> Tensor:
            return torch.cat([torch.arange(0), *ranges]).to(place)

        found = Paged(
            self,
            offsets([host.lengths[i] for i in taken]),
            offsets(counts),
            torch.tensor([(total - 1) % size + 1 for total in totals], dtype=torch.int32),
            batch.page_table.flatten()[
                joined([torch.arange(n) + i * width for i, n in zip(taken, counts, strict=True)])
            ],
            joined([torch.arange(starts[i], starts[i + 1]) for i in taken]) if batch.may_pad else None,
        )
        if taken:
            self.ready(found)
        return found

    def ready(self, step: Paged) -> Any:
        """The wrapper, planned for this step."""
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        if self._wrapper is None:
            buffer = torch.zeros(WORKSPACE, dtype=torch.uint8, device=self.place)
            backend = self.settings["backend"]
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(buffer, kv_layout="NHD", backend=backend)
        if self._last is not step:
            if self._copied is not None:
                # the plan before is copied from one pinned buffer, which this one fills
                self._copied.synchronize()
            op, kind = self.op, getattr(torch, self.op.dtype)
            # the dtypes' default is float16, whatever q is
            self._wrapper.plan(
                step.rows, step.pages, step.indices, step.last, num_qo_heads=op.heads, num_kv_heads=op.kv_heads,
                head_dim_qk=op.head_dim, page_size=op.page_size, causal=True, sm_scale=op.head_dim**-0.5,
                q_data_type=kind, kv_data_type=kind,
            )  # fmt: skip
            if step.indices.device.type != "cpu":
                self._copied = torch.Event(step.indices.device)
                self._copied.record()
            self._last = step
        return self._wrapper


def offsets(counts: list[int]) -> Tensor:
    """``[len(counts) + 1]`` int32 on the host: where each begins, and the end."""
    return torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)


def prefill(site: Site) -> Call:
    # absent, it fails here and not in the first step
    import flashinfer.prefill  # noqa: F401

    key, overlaps = site.planned(Planner(site)), site.settings["PDL"]

    def attended(q: Tensor, gate: Tensor, kv: Tensor, step: Paged) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.rows.shape[0] > 1:
            step.planner.ready(step).run(aligned(q), kv, out=out, enable_pdl=overlaps)
        return out.mul_(gate.sigmoid())

    def run(q: Tensor, gate: Tensor, state: tuple[Tensor], batch: Batch) -> Tensor:
        (kv,) = state
        step: Paged = batch.planned(key)
        if step.kept is None:
            return attended(q, gate, kv, step).flatten(1)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        out[step.kept] = attended(q[step.kept], gate[step.kept], kv, step)
        return out.flatten(1)

    return run


def unit(x: Tensor) -> Tensor:
    """L2 norm over the last axis in float32: the flag that asks FlashInfer for it is ignored by some versions."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def chunk(site: Site) -> Call:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

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
        q, k, v = (x.unflatten(1, (-1, n)) for x, n in zip(given[:3], dims, strict=True))
        log = -a_log.exp() * torch.nn.functional.softplus(given[4].float() + dt_bias.float())
        out, final = chunk_gated_delta_rule(
            unit(q),
            unit(k),
            aligned(v.contiguous()),
            # the decay itself, not its logarithm, which is taken inside: none of 0
            g=log.exp().clamp_(min=LEAST),
            beta=given[3].float().sigmoid(),
            scale=op.key_head_dim**-0.5,
            initial_state=torch.where(plan.fresh, 0, pool[plan.slots].float()),
            output_final_state=True,
            cu_seqlens=plan.cu_seqlens,
            use_qk_l2norm_in_kernel=False,
        )
        pool[plan.slots[plan.stays]] = final[plan.stays].to(pool.dtype)
        return torch.where(batch.padding[:, None, None], 0, out) if batch.may_pad else out

    return run
