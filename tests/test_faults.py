"""Public faults of other projects' delta-rule and convolution kernels: small inputs with their right values.

Others of the same list are tests of their own: device gates in test_requirement and test_resolving, probing
in test_probing, splits of a sequence in test_splits, checkpoints in test_weights and test_sharding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal
from hal.ops import CausalConv, GatedDeltaDecode, GatedDeltaPrefill, GatedDeltaUpdate


def update(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: str = "float32", **params: Any
) -> tuple[Any, GatedDeltaUpdate]:
    """A bound delta rule for one token of each sequence, with A_log = 0 and dt_bias = 0 unless given."""
    op = GatedDeltaUpdate(
        key_heads=key_heads,
        value_heads=value_heads,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        dtype=dtype,
        decode=True,
    )
    runtime = hal.Runtime(hal.load_device("cpu"), hal.Policy())
    bound = runtime.bind(op, "update")
    storages = runtime.group_of(bound).storages
    for name in ("A_log", "dt_bias"):
        storages[name].put(name, torch.as_tensor(params.get(name, torch.zeros(value_heads))).float())
        storages[name].seal()

    def run(q: Any, k: Any, v: Any, b: Any, a: Any, state: torch.Tensor) -> torch.Tensor:
        mixed = tuple(torch.as_tensor(x, dtype=getattr(torch, dtype)).flatten()[None] for x in (q, k, v))
        gates = [torch.as_tensor(x, dtype=getattr(torch, dtype)).reshape(1, value_heads) for x in (b, a)]
        batch = hal.make_batch("decode", [1], [3], [0])
        runtime.begin(batch)
        return bound(mixed, *gates, (state,), batch)  # type: ignore[no-any-return]

    return run, op


def decay_of(factor: float) -> float:
    """The ``a`` whose decay is ``factor`` under A_log = 0 and dt_bias = 0: softplus(a) = -log(factor)."""
    wanted = -torch.tensor(factor, dtype=torch.float64).log()
    return float(torch.expm1(wanted).log()) if wanted > 0 else -200.0


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_the_gate_s_space_is_stated_once(factor: float) -> None:
    run, _ = update(1, 1, 4, 4)
    state = torch.ones(1, 1, 4, 4)
    run(torch.zeros(4), torch.zeros(4), torch.zeros(4), [-200.0], [decay_of(factor)], state)
    assert torch.allclose(state, torch.full_like(state, factor), atol=1e-6)


def test_beta_is_not_rounded_to_the_dtype_of_b() -> None:
    run, _ = update(1, 1, 16, 16, "bfloat16")
    key = torch.zeros(16)
    key[0] = 1.0
    state = torch.zeros(1, 1, 16, 16)
    run(torch.zeros(16), key, torch.ones(16), [2.0], [-200.0], state)
    # sigmoid(2) is 0.8807971; through bfloat16 it would be 0.87890625
    assert torch.allclose(state[0, 0, :, 0], torch.full((16,), 0.8807971), atol=1e-6)


@pytest.mark.parametrize(("entry", "unit"), [(1e-4, 0.0662), (0.0, 0.0), (1e3, 128**-0.5)])
def test_the_epsilon_stands_beside_the_sum(entry: float, unit: float) -> None:
    run, _ = update(1, 1, 128, 8)
    state = torch.zeros(1, 1, 8, 128)
    run(torch.zeros(128), torch.full((128,), entry), torch.ones(8), [200.0], [-200.0], state)
    assert torch.isfinite(state).all()
    assert torch.allclose(state, torch.full_like(state, unit), atol=1e-4)


def test_decay_comes_before_the_error() -> None:
    run, _ = update(1, 1, 8, 8)
    state = torch.zeros(1, 1, 8, 8)
    state[0, 0, 0, 0] = 1.0
    key = torch.zeros(8)
    key[0] = 1e4  # so that the epsilon vanishes
    run(torch.zeros(8), key, torch.zeros(8), [200.0], [decay_of(0.5)], state)
    assert abs(float(state[0, 0, 0, 0])) < 1e-6  # the wrong order gives -0.5


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
def test_value_heads_are_grouped_not_tiled(ratio: int) -> None:
    run, op = update(2, 2 * ratio, 4, 4)
    state = torch.zeros(1, 2 * ratio, 4, 4)
    keys = torch.eye(4)[:2] * 1e4  # key head 0 points along axis 0, key head 1 along axis 1
    run(torch.zeros(2, 4), keys, torch.ones(2 * ratio, 4), [200.0] * 2 * ratio, [-200.0] * 2 * ratio, state)
    for head in range(op.value_heads):
        axis = head // ratio
        assert torch.allclose(state[0, head, :, axis], torch.ones(4), atol=1e-5)
        assert state[0, head].sum() == pytest.approx(4.0, abs=1e-4)


def sizes(dtype: str = "float32") -> dict[str, Any]:
    return {"key_heads": 1, "value_heads": 2, "key_head_dim": 8, "value_head_dim": 8, "dtype": dtype}


@pytest.mark.parametrize("lengths", [(3, 0, 1, 5), (1, 1, 1)])
def test_packed_sequences_do_not_leak_into_each_other(lengths: tuple[int, ...]) -> None:
    op = GatedDeltaPrefill(**sizes(), out=hal.formats.Tensor("float32"))
    runtime = hal.Runtime(hal.load_device("cpu"), hal.Policy())
    bound = runtime.bind(op, "core")
    generator = torch.Generator().manual_seed(0)
    group = runtime.group_of(bound)
    for p in op.params():
        group.storages[p.memory].put(p.name, torch.randn(p.shape, generator=generator) * 0.3)
    rows = sum(lengths)
    projected = torch.randn(rows, op.conv_dim + op.value_dim + 4, generator=generator)
    start = [torch.randn(pool.shape, generator=generator) for pool in group.new_state(len(lengths))]

    def run(which: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        pools = tuple(pool.clone() for pool in start)
        batch = hal.make_batch("prefill", [lengths[i] for i in which], [3] * len(which), which)
        runtime.begin(batch)
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        x = torch.cat([projected[ends[i] - lengths[i] : ends[i]] for i in which])
        parts = x.split([op.conv_dim, op.value_dim, 2, 2], 1)
        return bound(parts, pools, batch), pools

    together, after = run(list(range(len(lengths))))
    row = 0
    for i, length in enumerate(lengths):
        alone, states = run([i])
        assert torch.allclose(together[row : row + length], alone, atol=1e-5)
        for pool, own, first in zip(after, states, start, strict=True):
            assert torch.allclose(pool[i], own[i], atol=1e-5)
            if not length:
                assert torch.equal(pool[i], first[i])
        row += length


@pytest.mark.parametrize("decode", [True, False])
def test_padding_gives_zeros_and_moves_nothing_whatever_stands_there(decode: bool) -> None:
    op = CausalConv(**sizes("bfloat16"), decode=decode)
    runtime = hal.Runtime(hal.load_device("cpu"), hal.Policy())
    bound = runtime.bind(op, "conv")
    group = runtime.group_of(bound)
    for p in op.params():
        group.storages[p.memory].put(p.name, torch.ones(p.shape, dtype=torch.bfloat16))
    (pool,) = group.new_state(6)
    pool.fill_(1.0)
    before = pool.clone()
    x = torch.ones(3, op.conv_dim, dtype=torch.bfloat16)
    x[1] = float("nan")
    batch = hal.make_batch("decode" if decode else "prefill", [1, 1, 1], [4, 4, 4], [2, -1, 5])
    runtime.begin(batch)
    out = torch.cat(bound(x, (pool,), batch), 1)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.isfinite(out).all()
    for slot in (0, 1, 3, 4):
        assert torch.equal(pool[slot], before[slot])


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_combine_or_are_refused_never_reinterpreted(dtype: str, state: str) -> None:
    op = GatedDeltaDecode(**sizes(dtype), state_dtype=state, out=hal.formats.Tensor(dtype))
    (choice,) = hal.Resolver(hal.Registry.installed(), hal.load_device("cpu")).resolve((op,))
    assert choice.at(1).kernel.name.startswith("torch.")
