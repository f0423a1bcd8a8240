"""Other libraries' kernels for the same work, where they are installed: timed beside ours, used by nothing.

``PYTHONPATH=bench hal bench RMSNorm --peers peers:peers`` times them on the problems of ``hal bench``.
FlashInfer and SGLang's Triton kernels are taken where they can be imported; a peer whose module is
not there has no row, one that fails has a row with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import peers_sglang
import torch
from torch import Tensor

Calls = list[Callable[[], Any]]
WORKSPACE = 128 * 1024 * 1024


def found(module: str) -> Any:
    """The module, or nothing where it, or a package around it, is not there. What it lacks itself is an error."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return None
        raise


def delta_updates(
    op: Any, inputs: Sequence[Any], batches: Sequence[Any], deltas: Sequence[Tensor], small: Mapping[str, Tensor]
) -> dict[str, Calls]:
    """By name, a call for each step: FlashInfer's update of the delta state alone (no convolution, no norm)."""
    library = found("flashinfer.gdn_decode")
    if library is None:
        return {}
    # its kernels want addresses that are multiples of 32 bytes
    a_log, dt_bias = small["A_log"].clone(), small["dt_bias"].float()

    def call(projected: Any, batch: Any, delta: Tensor) -> Callable[[], Any]:
        _, _, b, a = projected
        rows = b.shape[0]

        def normal(heads: int, size: int) -> Tensor:
            return torch.randn(rows, 1, heads, size, device=b.device, dtype=b.dtype)

        q, k = (normal(op.key_heads, op.key_head_dim) for _ in range(2))
        v = normal(op.value_heads, op.value_head_dim)
        out, slots = torch.empty_like(v), batch.slots.clone()
        a, b = (x.reshape(rows, 1, op.value_heads).contiguous() for x in (a, b))
        return lambda: library.gated_delta_rule_decode_pretranspose(
            q, k, v, None, a_log, a, dt_bias, b, output=out, use_qk_l2norm=True, initial_state=delta,
            initial_state_indices=slots,
        )  # fmt: skip

    return {"flashinfer, update alone": [call(*step) for step in zip(inputs, batches, deltas, strict=True)]}


def _delta_updates(problem: Any) -> Calls:
    inputs, deltas = [args[0] for args in problem.args], [pools[-1] for pools in problem.states]
    batches = [problem.batch] * len(inputs)
    return next(iter(delta_updates(problem.op, inputs, batches, deltas, problem.params[0]).values()), [])


def rms_norm(eps: float, offset: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The formula, for torch.compile: of the weight and x."""

    def run(weight: Tensor, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (offset + weight.float())).to(x.dtype)

    return run


def add_rms_norm(eps: float, offset: float) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same."""
    norm = rms_norm(eps, offset)

    def run(weight: Tensor, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + partial
        return norm(weight, residual), residual

    return run


def silu_mul(x: Tensor) -> Tensor:
    """The same."""
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def qk_norm_rope(op: Any, place: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """The same, angles in float32; of both weights, qkv, the pages and where each row lies."""
    half, norm = op.rotary_dim // 2, rms_norm(op.eps, 1.0)
    axes = torch.tensor([op.axis(i) for i in range(half)], device=place)
    frequency = op.theta ** (-2 * torch.arange(half, device=place) / op.rotary_dim)
    widths = [2 * op.heads * op.head_dim, op.kv_heads * op.head_dim, op.kv_heads * op.head_dim]

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high, rest = x.float().split([half, half, op.head_dim - 2 * half], -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1).to(x.dtype)

    def run(
        q_norm: Tensor, k_norm: Tensor, qkv: Tensor, kv: Tensor, positions: Tensor, cells: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_gate, k, v = qkv.split(widths, 1)
        q, gate = q_gate.unflatten(1, (op.heads, 2 * op.head_dim)).chunk(2, -1)
        k, v = (x.unflatten(1, (op.kv_heads, op.head_dim)) for x in (k, v))
        three = positions.expand(3, -1) if positions.dim() == 1 else positions
        angle = (three[axes].T * frequency)[:, None, :]
        cos, sin = angle.cos(), angle.sin()
        page, offset = cells // op.page_size, cells % op.page_size
        kv[page, 0, offset] = turned(norm(k_norm, k), cos, sin)
        kv[page, 1, offset] = v
        return turned(norm(q_norm, q), cos, sin), gate

    return run


def _compiled(formula: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Calls:
    # each problem anew: after a few sizes the compiler stops without a word
    torch._dynamo.reset()
    run = torch.compile(formula, dynamic=False)
    return [partial(run, *each) for each in arguments]


def _compiled_norm(problem: Any) -> Calls:
    op = problem.op
    formula = rms_norm if op.title() == "RMSNorm" else add_rms_norm
    pairs = zip(problem.args, problem.params, strict=True)
    return _compiled(formula(op.eps, op.offset), [(params["norm"], *args) for args, params in pairs])


def _compiled_rope(problem: Any) -> Calls:
    batch, steps = problem.batch, zip(problem.args, problem.states, problem.params, strict=True)
    given = [
        (params["q_norm"], params["k_norm"], args[0], pools[0], batch.positions, batch.cells)
        for args, pools, params in steps
    ]
    return _compiled(qk_norm_rope(problem.op, batch.cells.device), given)


def _copies(problem: Any) -> Sequence[tuple[Any, Any]]:
    return list(zip(problem.args, problem.states, strict=True))


def _norms(problem: Any) -> Calls:
    library = found("flashinfer.norm")
    if library is None:
        return []
    norm = library.gemma_rmsnorm if problem.op.offset == 1 else library.rmsnorm
    pairs = zip(problem.args, problem.params, strict=True)
    return [partial(norm, args[0], params["norm"], problem.op.eps) for args, params in pairs]


def _added_norms(problem: Any) -> Calls:
    library = found("flashinfer.norm")
    if library is None:
        return []
    norm = library.gemma_fused_add_rmsnorm if problem.op.offset == 1 else library.fused_add_rmsnorm
    # it writes over both
    own = [tuple(x.clone() for x in args) for args in problem.args]
    return [
        partial(norm, *args, params["norm"], problem.op.eps) for args, params in zip(own, problem.params, strict=True)
    ]


def _activations(problem: Any) -> Calls:
    library = found("flashinfer.activation")
    return [partial(library.silu_and_mul, *args) for args in problem.args] if library else []


def _pages(problem: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of each sequence's pages on the host, all pages on the device, tokens in the last on the host."""
    batch, size = problem.batch, problem.op.page_size
    totals = batch.host.kv_lengths
    counts = [-(-total // size) for total in totals]
    table = [batch.page_table[i, :count] for i, count in enumerate(counts)]
    ends = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
    return ends, torch.cat(table), torch.tensor([(t - 1) % size + 1 for t in totals], dtype=torch.int32)


def _planned(op: Any) -> dict[str, Any]:
    kind = getattr(torch, op.dtype)
    return {"sm_scale": op.head_dim**-0.5, "q_data_type": kind, "kv_data_type": kind}


def _workspace(problem: Any) -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=problem.args[0][0].device)


def _decodes(problem: Any, tensor_cores: bool) -> Calls:
    library, op = found("flashinfer.decode"), problem.op
    if library is None:
        return []
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(_workspace(problem), "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(*_pages(problem), op.heads, op.kv_heads, op.head_dim, op.page_size, **_planned(op))
    return [partial(wrapper.run, args[0], pools[0]) for args, pools in _copies(problem)]


def _prefills(problem: Any) -> Calls:
    library, op = found("flashinfer.prefill"), problem.op
    if library is None:
        return []
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(problem), "NHD")
    rows = torch.tensor(list(accumulate(problem.batch.host.lengths, initial=0)), dtype=torch.int32)
    wrapper.plan(
        rows, *_pages(problem), op.heads, op.kv_heads, op.head_dim, op.page_size, causal=True, **_planned(op)
    )  # fmt: skip
    return [partial(wrapper.run, args[0], pools[0]) for args, pools in _copies(problem)]


PEERS: Mapping[str, Mapping[str, Callable[[Any], Calls]]] = {
    "RMSNorm": {"torch.compile": _compiled_norm, "flashinfer": _norms},
    "AddRMSNorm": {"torch.compile": _compiled_norm, "flashinfer, in place": _added_norms},
    "SiluMul": {
        "torch.compile": lambda problem: _compiled(silu_mul, problem.args),
        "flashinfer": _activations,
    },
    "QKNormRope": {"torch.compile": _compiled_rope},
    "AttentionDecode": {
        "flashinfer, no gate": partial(_decodes, tensor_cores=False),
        "flashinfer, tensor cores, no gate": partial(_decodes, tensor_cores=True),
    },
    "AttentionPrefill": {"flashinfer, no gate": _prefills},
    "GatedDeltaDecode": {
        "flashinfer, update alone": _delta_updates,
        "sglang, whole core": partial(peers_sglang.cores, found),
    },
    "GatedDeltaVerify": {
        "sglang, states of each token, commit": partial(peers_sglang.verifications, found, ring=False),
        "sglang, ring, fold": partial(peers_sglang.verifications, found, ring=True),
    },
    "MoE": {"sglang, routed experts alone": partial(peers_sglang.experts, found)},
}


def _failing(error: Exception) -> Any:
    raise error


def peers(problem: Any) -> dict[str, Calls]:
    """By name, a call for each copy of a problem of ``hal bench``."""
    calls: dict[str, Calls] = {}
    for name, make in PEERS.get(problem.op.title(), {}).items():
        try:
            made = make(problem)
        except Exception as error:  # noqa: BLE001 - one that fails is a row, and the others go on
            made = [partial(_failing, error)]
        if made:
            calls[name] = made
    return calls
