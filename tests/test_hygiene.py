"""Known faults of launches, graphs, norms and rotary positions: each as a test of its whole kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import faults

import hal
from hal.errors import CheckError
from hal.fixed import FixedBatch
from hal.ops import OPS, QKNormRope, SiluMul

HERE = Path(__file__).parent
ROOT = HERE.parent


def test_far_slots_and_small_weights_in_torch() -> None:
    assert {name: said for name, said in faults("cpu", "torch").items() if said} == {}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_far_slots_and_small_weights_in_triton() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    words = [sys.executable, str(HERE / "faulty.py"), "h200"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 5
    assert {name: said for name, said in found.items() if said} == {}


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_every_op_has_a_case_without_rows(op: Any) -> None:
    assert 0 in [case.rows for case in op.cases()]


def test_nothing_is_tuned_by_running_it() -> None:
    for path in (ROOT / "backends").rglob("*.py"):
        assert "autotune" not in path.read_text(), path


def test_tensors_of_several_devices_are_an_error_that_names_one() -> None:
    op = hal.ops.AddRMSNorm(hidden=8)
    here = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(CheckError, match=r"AddRMSNorm: residual: expected on cpu as partial is, got meta"):
        op.check(here, here.to("meta"))
    decode = hal.ops.GatedDeltaUpdate.cases()[-1].op
    batch = hal.make_batch("decode", [1], [0], [0]).to("meta")
    mixed = tuple(torch.zeros(1, n, dtype=torch.bfloat16) for n in (decode.key_dim, decode.key_dim, decode.value_dim))
    gates = (torch.zeros(1, decode.value_heads, dtype=torch.bfloat16),) * 2
    pool = torch.zeros(1, *decode.states()[0].shape)
    with pytest.raises(CheckError, match=r"GatedDeltaUpdate: batch: expected on cpu as q is, got meta"):
        decode.check(mixed, *gates, (pool,), batch)
    with pytest.raises(CheckError, match=r"GatedDeltaUpdate: state delta: expected on cpu as q is, got meta"):
        decode.check(mixed, *gates, (pool.to("meta"),), hal.make_batch("decode", [1], [0], [0]))


def test_the_tail_of_a_fixed_batch_is_never_stale() -> None:
    fixed = FixedBatch(4, 4, 16, "cpu")
    greedy = hal.Sampling()
    fixed.fill([7] * 4, [3] * 4, [5, 2, 7, 6], [[1], [2], [3], [4]], [greedy] * 4)
    fixed.fill([7] * 3, [4] * 3, [5, 2, 7], [[1], [2], [3]], [greedy] * 3)
    assert fixed.batch.slots.tolist() == [5, 2, 7, -1]
    assert fixed.batch.cells.tolist() == [20, 36, 52, -1]
    assert fixed.batch.padding.tolist() == [False] * 3 + [True]
    assert fixed.batch.page_table[3].tolist() == [-1] * 4
    fixed.advance(torch.tensor([1, 1, 1, 1]))
    assert fixed.batch.cells.tolist() == [21, 37, 53, -1]


def rope(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv that went in, then q, gate and the keys' page for two tokens at these positions; unit norm weights."""
    op = QKNormRope(
        heads=4, kv_heads=1, head_dim=256, rotary_dim=64, theta=1e7, sections=(11, 11, 10), page_size=4, dtype="float32"
    )
    runtime = hal.Runtime(hal.load_device("cpu"), hal.Policy())
    bound = runtime.bind(op, "rope")
    group = runtime.group_of(bound)
    for p in op.params():
        group.storages[p.memory].put(p.name, torch.zeros(p.shape))
    torch.manual_seed(0)
    qkv = torch.randn(2, 4 * 512 + 512)
    (pool,) = state = group.new_state(1)
    batch = hal.make_batch("prefill", [2], [0], [0], pages=[[0]], page_size=4, positions=positions)
    q, gate = bound(qkv, state, runtime.begin(batch))
    return qkv, q, gate, pool


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """float64: pairs (i, i + 32) of the first 64 by 32 angles, the rest as it is."""
    a, b, rest = x[..., :32], x[..., 32:64], x[..., 64:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)


@pytest.mark.parametrize("strided", [False, True])
def test_three_rows_of_positions_turn_their_own_frequencies(strided: bool) -> None:
    rows = torch.tensor([[5, 0], [7, 1], [9, 2]])
    if strided:
        wide = torch.full((3, 64), 1000)
        wide[:, :2] = rows
        positions = wide[:, :2]
    else:
        positions = rows
    qkv, q, gate, pool = rope(positions)
    theta = 1e7 ** (-torch.arange(32).double() / 32)
    # interleaved: time, height, width in turn, as far as their sections reach; time beyond
    axis = torch.tensor([i % 3 if i % 3 and i < 3 * (11, 11, 10)[i % 3] else 0 for i in range(32)])
    angles = rows.T.double()[:, axis] * theta
    heads = qkv[:, :2048].view(2, 4, 512).double()
    unit = heads[..., :256] * (heads[..., :256].square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert torch.allclose(q.double().view(2, 4, 256), turned(unit, angles[:, None]), atol=1e-5)
    # the gate is neither normed nor turned
    assert torch.equal(gate.reshape(2, 4, 256), heads[..., 256:].float())
    keys = qkv[:, 2048:2304].double()
    keys = keys * (keys.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert torch.allclose(pool[0, 0, :2, 0].double(), turned(keys, angles), atol=1e-5)
    assert torch.equal(pool[0, 1, :2, 0], qkv[:, 2304:])


def test_one_row_of_positions_is_three_equal_ones() -> None:
    one = torch.tensor([3, 8])
    for a, b in zip(rope(one), rope(one.expand(3, 2)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(4, 2), (2, 2), (3, 5), (5,)])
def test_positions_of_another_shape_are_an_error(shape: tuple[int, ...]) -> None:
    op = QKNormRope(heads=4, kv_heads=1, head_dim=256, rotary_dim=64, theta=1e7, sections=(11, 11, 10), page_size=4)
    batch = hal.make_batch("prefill", [2], [0], [0], pages=[[0]], page_size=4, positions=torch.zeros(shape).long())
    pool = torch.zeros(1, 2, 4, 1, 256, dtype=torch.bfloat16)
    with pytest.raises(CheckError, match=r"QKNormRope: batch\.positions"):
        op.check(torch.zeros(2, 4 * 512 + 512, dtype=torch.bfloat16), (pool,), batch)


def test_strided_rows_give_what_dense_ones_give() -> None:
    runtime = hal.Runtime(hal.load_device("cpu"), hal.Policy())
    x = torch.randn(5, 200).to(torch.bfloat16)[:, 4:100]
    bound = runtime.bind(SiluMul(columns=48), "act")
    assert torch.equal(bound(x), bound(x.contiguous()))
    with pytest.raises(CheckError, match=r"SiluMul: x: axis 1 must have stride 1"):
        SiluMul(columns=48).check(torch.randn(5, 192).to(torch.bfloat16)[:, ::2])
