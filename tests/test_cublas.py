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

# what would serve the other rows, or a part, and has no code for a CPU
GPU_ONLY = ("cuda.gemm_few", "cuda.in_proj_few", "cuda.flashinfer_rms_norm", "cuda.flashinfer_add_rms_norm")


@pytest.mark.parametrize(
    ("op", "name"),
    [("Linear", "cuda.linear"), ("Gemm", "cuda.gemm"), ("InProj", "cuda.packed"), ("InProj", "cuda.pair")],
)
def test_it_keeps_its_contract(op: str, name: str) -> None:
    registry = Registry()
    for backend in (hal.composed.backend, hal_torch.backend, hal_cuda.backend):
        registry.add_backend(backend)
    policy = hal.Policy.of(deny=GPU_ONLY)
    found = list(verify_kernel(hal.Runtime(device("h200"), policy, registry, place="cpu"), OPS[op], name))
    assert not [v for v in found if v.status == "failed"]
    assert [v for v in found if v.status == "passed"]
