"""cuBLAS's kernels on the facts of an H200, torch's products on the CPU in its place."""

from __future__ import annotations

import hal_cuda
import hal_torch
import pytest
from facts import device

import hal
import hal.composed
from hal.conformance import verify_kernel
from hal.ops import OPS
from hal.registry import Registry


@pytest.mark.parametrize(
    ("op", "name"),
    [("Linear", "cuda.linear"), ("Gemm", "cuda.gemm"), ("InProj", "cuda.packed"), ("InProj", "cuda.pair")],
)
def test_it_keeps_its_contract(op: str, name: str) -> None:
    registry = Registry()
    for backend in (hal.composed.backend, hal_torch.backend, hal_cuda.backend):
        registry.add_backend(backend)
    facts = device("h200", flashinfer=None, cuda_bindings=None)
    found = list(verify_kernel(hal.Runtime(facts, hal.Policy(), registry, place="cpu"), OPS[op], name))
    assert not [v for v in found if v.status == "failed"]
    assert [v for v in found if v.status == "passed"]
