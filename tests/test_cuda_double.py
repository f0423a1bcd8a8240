"""CUDA C++ of the decode and verify cores, run on the CPU: every case of their ops, with heads that they take."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import cuda_double
import hal_cuda.gated_delta
import pytest

import hal
from hal.conformance import Verdict, verify_kernel
from hal.ops import GatedDeltaDecode, GatedDeltaVerify
from hal.ops.base import Case

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(autouse=True)
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal_cuda.code.gated_delta.Function", cuda_double.Function)


def verdicts(name: str, cases: Sequence[Case], monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """Of these cases, their heads of 64 elements."""
    op = type(cases[0].op)
    sized = [replace(c, op=replace(c.op, key_head_dim=64, value_head_dim=64)) for c in cases]
    monkeypatch.setattr(op, "cases", classmethod(lambda cls: sized))
    runtime = hal.Runtime(hal.load_device("h200").replaced(pdl=False), hal.Policy(), place="cpu")
    return list(verify_kernel(runtime, op, name))


@pytest.mark.parametrize(("name", "op"), [("cuda.decode_whole", GatedDeltaDecode), ("cuda.verify", GatedDeltaVerify)])
def test_every_case_is_computed_as_the_reference_does(name: str, op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(name, op.cases(), monkeypatch)
    assert not [v for v in found if v.status == "failed"]
    # what is refused is so for its dtype or its convolution
    assert sum(v.status == "passed" for v in found) >= len(found) - 4


@pytest.mark.parametrize("launch", ["few", "more"])
def test_every_launch_of_the_verify_core(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = hal_cuda.gated_delta.Verify.settings

    def one(self: Any, op: GatedDeltaVerify, device: hal.Device) -> Mapping[str, Any]:
        found = {k: v for k, v in settings(self, op, device).items() if k not in ("PDL", "unaligned")}
        chosen = dict(zip(("few", "more"), found.values(), strict=True))[launch]
        return {"PDL": False, "unaligned": chosen, "more": chosen}

    monkeypatch.setattr(hal_cuda.gated_delta.Verify, "settings", one)
    names = ("2, 4 and 3 after 1, 4 and 2", "bfloat16 state", "eight")
    found = verdicts("cuda.verify", [c for c in GatedDeltaVerify.cases() if c.name in names], monkeypatch)
    assert [v.status for v in found] == ["passed"] * 3, found
