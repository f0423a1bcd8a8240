"""The code of composed kernels: calls of parts, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hal.kernel import Site
from hal.ops.linear import part_groups

Call = Callable[..., Any]


def then_quantize(site: Site) -> Call:
    """Make, then encode; of a pair (value, residual) the value is encoded, once for each format."""
    make, out = site.parts["make"], site.op.out
    if isinstance(out, tuple):
        encoders = [site.parts.get(f"quantize{i}", _as_it_is) for i in range(len(out))]
    else:
        encoders = [site.parts["quantize"]]

    def encode(value: Any) -> Any:
        found = tuple(encoder(value) for encoder in encoders)
        return found if isinstance(out, tuple) else found[0]

    if len(site.op.signature().results) > 1:

        def pair(*args: Any) -> Any:
            value, residual = make(*args)
            return encode(value), residual

        return pair
    return lambda *args: encode(make(*args))


def _as_it_is(value: Any) -> Any:
    return value


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


def _grouped(
    site: Site, made: Sequence[Mapping[str, int]], wanted: Iterable[str], joined: Callable[[list[Any]], Any]
) -> Call:
    """A product for each group of parts: ``made``, columns by name as it gives them; ``wanted``: the order of names."""
    norm, gemms = site.parts["norm"], [site.parts[f"gemm{group.suffix}"] for group in part_groups(site.op.parts)]
    order = [name for names in made for name in names]
    places = [order.index(name) for name in wanted]
    cuts = [list(names.values()) for names in made]
    several = isinstance(norm.choice.op.out, tuple)

    def run(partial: Any, residual: Any) -> Any:
        value, residual = norm(partial, residual)
        values = value if several else (value,) * len(gemms)
        found: list[Any] = []
        for gemm, x, widths in zip(gemms, values, cuts, strict=True):
            found += gemm(x).split(widths, 1)
        return joined([found[place] for place in places]), residual

    return run


def in_proj(site: Site) -> Call:
    """A product for each group of parts, its columns cut to the outputs."""
    outputs = site.op.outputs()
    made = [{p.output: outputs[p.output] for p in group.parts} for group in part_groups(site.op.parts)]
    return _grouped(site, made, outputs, tuple)


def norm_linear(site: Site) -> Call:
    return _opened(site.parts["norm"], site.parts["gemm"])


def norm_linears(site: Site) -> Call:
    """A product for each group of parts, put side by side in the order of the parts."""
    import torch

    made = [{p.name: p.rows for p in group.parts} for group in part_groups(site.op.parts)]
    return _grouped(site, made, [p.name for p in site.op.parts], lambda found: torch.cat(found, 1))


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
    several = isinstance(norm.choice.op.out, tuple)

    def run(partial: Any, residual: Any) -> Any:
        value, _ = norm(partial, residual)
        x, hidden = value if several else (value, value)
        logits = gemm(x)
        return (gather(logits) if gather else logits), hidden

    return run
