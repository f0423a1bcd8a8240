"""fp8 through torch._scaled_mm: its contract on this CPU, where torch has the same call, and what a plan chooses."""

from __future__ import annotations

from typing import Any

import hal_cuda
import hal_torch
import pytest
import torch
from facts import device, value

import hal
import hal.composed
from hal.conformance import verify_kernel
from hal.formats import SCHEMES, Encoded
from hal.ops import Gemm, InProj, Linear, Projection
from hal.registry import Registry

CHANNEL = SCHEMES["fp8_channel"]


def on_cpu() -> str:
    """Why torch has no such product on a CPU, or nothing."""
    x = torch.ones(2, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(x, x.repeat(8, 1).T, torch.ones(2, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"torch {torch.__version__} has no rowwise _scaled_mm on a CPU: {error}"
    return ""


WHY = on_cpu()
here = pytest.mark.skipif(bool(WHY), reason=WHY)


def runtime(**more: Any) -> hal.Runtime:
    registry = Registry()
    for backend in (hal.composed.backend, hal_torch.backend, hal_cuda.backend):
        registry.add_backend(backend)
    return hal.Runtime(device("h200"), hal.Policy(), registry, **more)


@here
@pytest.mark.parametrize("op", [Linear, Gemm])
def test_it_keeps_its_contract(op: Any) -> None:
    found = {v.case: v for v in verify_kernel(runtime(place="cpu"), op, "cuda.scaled_mm")}
    assert not [v for v in found.values() if v.status == "failed"]
    assert found["fp8_channel both"].status == found["fp8_channel both, no rows"].status == "passed"


@here
def test_a_static_scale_beside_a_weight_by_rows(tmp_path: Any) -> None:
    scheme = SCHEMES["fp8_tensor"].by_rows()
    op = Gemm(columns=64, rows=32, scheme=scheme, x=scheme.activations or CHANNEL.weight)
    on = runtime(place="cpu")
    gemm = on.bind(op, "g")
    assert gemm.choice.kernels() == "cuda.scaled_mm"
    params = {p.name: value(p.name, p.shape, p.dtype, *p.init) for p in op.params()}
    on.group_of(gemm).fill(params)
    x = Encoded(value("x", (3, 64), "float32").to(torch.float8_e4m3fn), params["input_scale"])
    real = params["weight"].double() * params["weight_scale"].double()[:, None]
    want = x.value.double() * float(params["input_scale"]) @ real.T
    assert float((gemm(x).double() - want).abs().max()) <= 2**-7 * float(want.abs().max())


def test_rows_are_padded_to_sixteen_where_they_are_not() -> None:
    on = runtime(load=False)
    for rows, layout in ((48, "packed"), (37, "padded:16")):
        choice = on.bind(Gemm(columns=64, rows=rows, scheme=CHANNEL), f"g{rows}", fed=True).choice
        assert (choice.kernels(), str(choice.layouts["weight"])) == ("cuda.scaled_mm", layout)
        assert str(choice.layouts["weight_scale"]) == layout


def test_b_and_a_stay_in_their_own_product() -> None:
    """27B over 4 ranks: q, k, v, z in fp8, 24 columns of b and a in bfloat16 out of the same norm."""
    widths = {"q": 512, "k": 512, "v": 1536, "z": 1536, "b": 12, "a": 12}
    outputs = {"q": "qkv", "k": "qkv", "v": "qkv"}
    parts = (Projection(n, r, outputs.get(n, n), None if n in "ba" else CHANNEL) for n, r in widths.items())
    choice = runtime(load=False).bind(InProj(hidden=5120, parts=tuple(parts)), "in_proj").choice
    found = dict(choice.walk())
    assert found["gemm_qkvz"].kernels() == "cuda.scaled_mm"
    assert found["gemm_ba"].op.schemes() == ()
    assert found["norm"].op.out == (CHANNEL.activations, found["gemm_ba"].op.x)


@pytest.mark.parametrize("label", ["a100", "mi300x"])
def test_a_device_without_it_says_so(label: str) -> None:
    registry = runtime(load=False).registry
    on = hal.Runtime(device(label), hal.Policy(), registry, load=False)
    choice = on.bind(Gemm(columns=64, rows=32, scheme=CHANNEL), "g", fed=True).choice
    reason = choice.why_not("cuda.scaled_mm", 1)
    assert reason.startswith("needs fp8_e4m3fn; a100" if label == "a100" else "needs vendor cuda; mi300x")
