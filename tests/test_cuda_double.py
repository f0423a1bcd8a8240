"""CUDA C++ of the verify core, run on the CPU for what it computes: every case of its op, with heads that it takes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cuda_double
import hal_cuda.gated_delta
import pytest

import hal
from hal.conformance import verify_kernel
from hal.ops import GatedDeltaVerify

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
KERNELS = {
    "cuda.verify": GatedDeltaVerify,
}


@pytest.fixture(autouse=True)
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal_cuda.code.gated_delta.Function", cuda_double.Function)


def verdicts(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of the op's cases, their heads of ``dim`` elements."""
    op = KERNELS[name]
    sized = [replace(c, op=replace(c.op, key_head_dim=dim, value_head_dim=dim)) for c in op.cases()]
    monkeypatch.setattr(op, "cases", classmethod(lambda cls: sized))
    runtime = hal.Runtime(hal.load_device("h200").replaced(pdl=False), hal.Policy(), place="cpu")
    return list(verify_kernel(runtime, op, name))


@pytest.mark.parametrize("name", KERNELS)
def test_every_case_is_computed_as_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(name, 64, monkeypatch)
    assert not [v for v in found if v.status == "failed"]
    # what is refused is so for its dtype or its convolution
    assert sum(v.status == "passed" for v in found) >= len(found) - 4


@pytest.mark.parametrize("launch", ["few", "some", "more"])
def test_every_launch_of_the_verify_core(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = hal_cuda.gated_delta.Verify.settings

    def one(self: Any, op: GatedDeltaVerify, device: hal.Device) -> Mapping[str, Any]:
        found = {k: v for k, v in settings(self, op, device).items() if k not in ("PDL", "unaligned")}
        chosen = dict(zip(("few", "some", "more"), found.values(), strict=True))[launch]
        return {"PDL": False, "unaligned": chosen, "more": chosen}

    monkeypatch.setattr(hal_cuda.gated_delta.Verify, "settings", one)
    op = GatedDeltaVerify
    few = [c for c in op.cases() if c.name in ("2, 4 and 3 after 1, 4 and 2", "bfloat16 state", "eight")]
    monkeypatch.setattr(op, "cases", classmethod(lambda cls: few))
    found = verdicts("cuda.verify", 64, monkeypatch)
    assert [v.status for v in found] == ["passed"] * 3, found
