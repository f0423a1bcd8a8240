"""The code of composed kernels: calls of parts, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hal.kernel import Site

Call = Callable[..., Any]


def then_quantize(site: Site) -> Call:
    """Make, then encode; of a pair (value, residual) the value is encoded."""
    make, quantize = site.parts["make"], site.parts["quantize"]
    if len(site.op.signature().results) > 1:

        def pair(*args: Any) -> Any:
            value, residual = make(*args)
            return quantize(value), residual

        return pair
    return lambda *args: quantize(make(*args))


def reduce_norm(site: Site) -> Call:
    reduce, norm = site.parts["reduce"], site.parts["norm"]
    return lambda partial, residual: norm(reduce(partial), residual)


def gated_delta(site: Site) -> Call:
    conv, update, norm = site.parts["conv"], site.parts["update"], site.parts["norm"]

    def run(projected: Any, state: Any, batch: Any) -> Any:
        qkv, z, b, a = projected
        conv_state, delta_state = state
        mixed = update(conv(qkv, (conv_state,), batch), b, a, (delta_state,), batch)
        # rows of padding are zero so far; a gate that is NaN there must not change that
        return norm(mixed, z.masked_fill(batch.padding[:, None], 0) if batch.may_pad else z)

    return run


def _opened(opening: Call, value: Call) -> Call:
    """What follows a layer's opening; the residual passes by."""

    def run(partial: Any, residual: Any) -> Any:
        x, residual = opening(partial, residual)
        return value(x), residual

    return run


def norm_linear(site: Site) -> Call:
    return _opened(site.parts["norm"], site.parts["gemm"])


def norm_gate_up(site: Site) -> Call:
    gemm, act = site.parts["gemm"], site.parts["act"]
    return _opened(site.parts["norm"], lambda x: act(gemm(x)))


def gated_mlp(site: Site) -> Call:
    return _opened(site.parts["gate_up"], site.parts["down"])


def draft_in(site: Site) -> Call:
    import torch

    token_norm, hidden_norm, gemm = (site.parts[n] for n in ("token", "hidden", "gemm"))
    reduce, columns = site.parts.get("reduce"), site.op.columns
    first = site.runtime.rank * columns

    def run(token: Any, hidden: Any) -> Any:
        x = torch.cat([token_norm(reduce(token) if reduce else token), hidden_norm(hidden)], 1)
        return gemm(x[:, first : first + columns])

    return run


def head(site: Site) -> Call:
    norm, gemm, gather = site.parts["norm"], site.parts["gemm"], site.parts.get("gather")

    def run(partial: Any, residual: Any) -> Any:
        hidden, _ = norm(partial, residual)
        logits = gemm(hidden)
        return (gather(logits) if gather else logits), hidden

    return run
