"""Every plain and composed kernel passes the cases of its op, on one device or another."""

from functools import cache

import pytest
import torch
from facts import fill, registry, runtime, value
from recording import record

from hal.conformance import Verdict, verify
from hal.conformance.inputs import make
from hal.device import load_device
from hal.ops import (
    OPS,
    AddRMSNorm,
    CausalConv,
    GatedDeltaPrefill,
    GatedDeltaUpdate,
    InProj,
)
from hal.ops.base import Op, Problem
from hal.policy import Policy
from hal.registry import Registry
from hal.runtime import Runtime

# none of its cases are for one rank: see the test with two below
ELSEWHERE = {"composed.reduce_norm"}


# nothing wants padding on a CPU; the facts of a GPU with the kernels that run here
PADDING = {InProj: "h200"}


@cache
def verdicts(op: type) -> list[Verdict]:
    """All cases of an op on all its kernels."""
    runs = [Runtime(load_device("cpu"), Policy(), Registry.installed(), load=False)]
    if op in PADDING:
        runs.append(Runtime(load_device(PADDING[op]), Policy(), registry(), load=False, place="cpu"))
    return [verdict for run in runs for verdict in verify(run, [op])]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_no_kernel_fails_a_case_of_its_op(op: type) -> None:
    assert [v for v in verdicts(op) if v.status == "failed"] == []


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_kernel_passes_a_case(op: type) -> None:
    passed = {v.kernel for v in verdicts(op) if v.status == "passed"}
    assert set(registry().names(op)) - passed <= ELSEWHERE


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_case_that_is_not_run_says_why(op: type) -> None:
    for verdict in verdicts(op):
        assert bool(verdict.detail) == (verdict.status != "passed")


@pytest.mark.parametrize("op", [GatedDeltaPrefill, CausalConv, GatedDeltaUpdate])
def test_a_sequence_of_no_tokens_moves_nothing(op: type[Op]) -> None:
    case = next(c for c in op.cases() if (0, 0) in zip(c.lengths, c.contexts, strict=True))
    problem = make(case).problem
    _, after = case.op.reference(problem)
    slots = [slot for slot, length in zip(case.slots, case.lengths, strict=True) if not length]
    assert len(slots) == 2
    for name, state in problem.states.items():
        assert state[slots].any()
        assert torch.equal(after[name][slots], state[slots])


def test_the_ranks_partial_sums_are_reduced_before_the_norm() -> None:
    class Twin:
        rank, world = 0, 2
        all_reduce = staticmethod(lambda tensor: tensor * 2)

    op = AddRMSNorm(hidden=96, world=2)
    rt = runtime(comm=Twin())
    bound = rt.bind(op, "norm")
    assert bound.choice.pieces[0].kernel.name == "composed.reduce_norm"
    fill(rt.group_of(bound))
    partial, residual = (value(n, (5, 96), "bfloat16") for n in ("partial", "residual"))
    args = {"partial": partial.double() * 2, "residual": residual.double()}
    norm = value("norm", (96,), "bfloat16", 0.0, 0.1).double()
    want, _ = op.reference(Problem(args, {"norm": norm}, {}))
    for a, b in zip(bound(partial, residual), want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2**-7, atol=2**-7)
    record("ran", "cpu", Verdict("AddRMSNorm", "composed.reduce_norm", "two ranks", "passed"))
