"""Public faults of other projects on AMD, in fp8 with shuffled weights, and in probing: small inputs, right values.

Others of the same list: gates in test_requirement, probes in test_probing*, aiter's import in test_aiter_emulated,
codes of each format in test_encodings, lists of what is excluded in test_dialects, sizes in test_rocm_rules.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import fake_aiter
import pytest
import torch
from emulated import registry
from facts import device
from hal_models.quantization import Quantization, Rule
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import Qwen35

import hal
from hal.device import Device
from hal.errors import CheckError, PolicyError
from hal.formats import SCHEMES, Encoded, Quantized, Scale, Scheme, dtype
from hal.ops import OPS, Gemm, Quantize, SiluMul
from hal.ops.formulas import decode, encode, real
from hal.report import lines
from hal.resolving import Resolver

INSTALLED = hal.Registry.installed()
NO_FP8 = {"fp8_e4m3fn": False, "fp8_e4m3fnuz": False}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    return fake_aiter.install(lambda name, module: monkeypatch.setitem(sys.modules, name, module))


def ran(on: Device) -> set[str]:
    """Kernels that run the first and the last case of each op: all are served."""
    resolver, found = Resolver(INSTALLED, on), set[str]()
    for op in OPS.values():
        for case in (op.cases()[0], op.cases()[-1]):
            (choice,) = resolver.resolve((case.op,))
            found |= {piece.kernel.name for _, each in choice.walk() for piece in each.pieces}
    return found


@pytest.mark.parametrize(
    "on",
    [device("mi300x"), device("mi355x"), device("rx-9070"), device("h200", vendor="rocm")],
    ids=["gfx942", "gfx950", "gfx1201", "sm_90 of another vendor"],
)
def test_no_op_of_another_vendor_s_chip_gets_a_kernel_of_cuda(on: Device) -> None:
    """ROCm's torch gives (9, 4) and (9, 5) as compute capability, which looks like Hopper's (9, 0)."""
    assert not [name for name in ran(on) if name.startswith("cuda.")]
    assert [name for name in ran(device("h200")) if name.startswith("cuda.")]


@pytest.mark.parametrize(
    ("label", "arch"), [("h200", "sm_121"), ("h200", "sm_130"), ("mi300x", "gfx1299"), ("mi300x", "gfx90a")]
)
def test_chips_that_no_table_names_reach_the_portable_path(label: str, arch: str) -> None:
    kernels = ran(device(label, arch=arch))
    assert {"triton.add_rms_norm", "triton.silu_mul"} <= kernels
    assert not [name for name in kernels if name.startswith("rocm.") and "bf16" not in name and "gemm" not in name]


def test_a_library_that_is_there_and_has_no_code_for_the_chip_is_refused_when_chosen() -> None:
    on = hal.Runtime(device("rx-9070"), hal.Policy.of(force=["SiluMul=rocm.silu_mul"]), registry(), load=False)
    said = "rocm.silu_mul is forced and cannot be had on rx-9070: needs arch gfx942 or gfx950; rx-9070 has 'gfx1201'"
    with pytest.raises(PolicyError, match=said):
        on.bind(SiluMul(columns=64), "act")


def test_each_layer_of_a_mix_has_the_kernel_of_its_own_scheme() -> None:
    cfg = configure("qwen3.5-2b")
    rules = (Rule("layers.0", SCHEMES["fp8_channel"]), Rule("layers.1", SCHEMES["mxfp4"]))
    on = hal.Runtime(device("mi300x"), hal.Policy(), registry(), load=False)
    Qwen35(replace(cfg, layers=cfg.layers[:3], quantization=Quantization("", rules)), on)
    down = {
        site: dict(line.choice.walk())["down"].kernels() for line in lines(on) for site in line.sites if "mlp" in site
    }
    assert down == {
        "layers.0.mlp": "rocm.packed_a8w8", "layers.1.mlp": "torch.linear_widened", "layers.2.mlp": "rocm.gemm",
    }  # fmt: skip


@pytest.mark.parametrize(("label", "arch"), [("mi300x", "gfx90a"), ("rx-9070", "gfx1100"), ("a100", "sm_80")])
def test_where_a_chip_has_no_fp8_plain_code_encodes_and_multiplies(label: str, arch: str) -> None:
    resolver = Resolver(INSTALLED, device(label, arch=arch, **NO_FP8))
    token = SCHEMES["fp8_channel"].activations
    for op in (Quantize(columns=512, out=token), Gemm(columns=512, rows=128, x=token, scheme=SCHEMES["fp8_channel"])):
        (choice,) = resolver.resolve((op,))
        assert choice.kernels() == ("torch.quantize" if isinstance(op, Quantize) else "torch.linear_quantized")
        others = [
            c for c in choice.candidates if c.status == "refused" and c.kernel.split(".")[0] in ("rocm", "triton")
        ]
        assert others
        assert {c.kind for c in others} <= {"device", "op", "edge"}


@pytest.mark.parametrize(
    ("label", "kind", "kernel"),
    [("mi300x", "float8_e4m3fnuz", "rocm.quantize_token"), ("mi355x", "float8_e4m3fn", "rocm.quantize_token"),
     ("h200", "float8_e4m3fn", "torch.quantize")],
)  # fmt: skip
@pytest.mark.parametrize("static", [False, True])
def test_the_largest_number_is_the_format_s_on_each_device(
    label: str, kind: str, kernel: str, static: bool, calls: dict[str, int]
) -> None:
    """An amax of 448: the scale is 1 in OCP's format, 448 / 240 in fnuz, whose limit is 240 and not 224."""
    form = Quantized(kind, Scale("tensor", static=True) if static else Scale("token"))
    on = hal.Runtime(device(label), hal.Policy(), registry(), place="cpu")
    bound = on.bind(Quantize(columns=64, out=form), "q", scales={"out": torch.tensor([1.0])} if static else None)
    assert bound.choice.at(2).kernel.name == (kernel.removesuffix("_token") if static else kernel)
    x = torch.zeros(2, 64).bfloat16()
    x[0, :3] = torch.tensor([448.0, -448.0, 224.0])
    found = bound(x)
    limit = dtype(kind).limit
    assert limit == {"float8_e4m3fnuz": 240, "float8_e4m3fn": 448}[kind]
    wide = found.value.float()
    if static:  # what is beyond the limit saturates, and is no NaN
        assert wide[0, :3].tolist() == [limit, -limit, 224]
    else:
        assert found.scale[0].item() == pytest.approx(448 / limit, rel=1e-6)
        assert wide[0, :3].tolist() == [limit, -limit, limit / 2]
    assert not wide[1].any()
    assert not wide.isnan().any()


BYTES = [0x38, 0xB8, 0x7E, 0xFE, 0x80, 0x00, 0x01, 0x81, 0x07, 0x08]
POWERS = [127, 126, 128, 120]


def stored(op: Gemm) -> dict[str, torch.Tensor]:
    """Parameters as a checkpoint holds them: these bytes, scales of 0.5, and bytes of powers of two."""
    assert op.scheme
    found = {}
    for p in op.params():
        kind, count = getattr(torch, p.dtype), torch.Size(p.shape).numel()
        if p.name == "weight":
            codes = torch.tensor(BYTES, dtype=torch.uint8).repeat(-(-count // len(BYTES)))[:count]
            found[p.name] = codes.view(kind).view(p.shape)
        elif kind == torch.uint8:
            found[p.name] = torch.tensor(POWERS, dtype=kind).repeat(-(-count // len(POWERS)))[:count].view(p.shape)
        else:
            found[p.name] = torch.full(p.shape, 0.5 if p.name == "weight_scale" else 0.25, dtype=kind)
    return found


@pytest.mark.parametrize("label", ["mi300x", "mi355x", "h200", "cpu"])
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_of_a_checkpoint_have_their_values_on_every_device(name: str, label: str, calls: dict[str, int]) -> None:
    """A row of x that is one 1 reads a column of the weight; read as fnuz a byte is half as much, and -0 is NaN."""
    scheme: Scheme = SCHEMES[name]
    on = hal.Runtime(device(label), hal.Policy(), registry(), place="cpu")
    linear = on.bind(Gemm(columns=512, rows=40, scheme=scheme.within(40, columns=512)), "g", fed=True)
    group, op = on.group_of(linear), linear.choice.op
    if name == "fp8_channel":
        assert linear.choice.kernels() == ("rocm.packed_a8w8" if label.startswith("mi") else "torch.linear_quantized")
    params = stored(op)
    rows = torch.eye(512)[torch.randperm(512, generator=torch.Generator().manual_seed(1))[:64]]
    weight, scale, whole = (params.get(n) for n in ("weight", "weight_scale", "weight_global"))
    weight = real(weight, scale, op.scheme.weight, torch.float64, whole)
    for _ in range(2):  # loaded again, converted again, from the bytes
        group.fill(params)
        x = encode(rows, op.x, params.get("input_scale"))
        # blocks under a fixed scale make a 1 of 1.03
        ones = decode(x, op.x, torch.float64) if isinstance(x, Encoded) else x.double()
        got = linear(x).double()
        assert torch.allclose(got, ones @ weight.T, rtol=2**-7, atol=0)
        assert not got.isnan().any()


@pytest.mark.parametrize(("k", "kernel"), [(144, "rocm.plain_a8w8"), (512, "rocm.packed_a8w8")])
def test_k_is_the_weight_s_whatever_lies_behind_x(k: int, kernel: str, calls: dict[str, int]) -> None:
    on = hal.Runtime(device("mi355x"), hal.Policy.of(check=True), registry(), place="cpu")
    linear = on.bind(Gemm(columns=k, rows=48, scheme=SCHEMES["fp8_channel"]), "g", fed=True)
    assert linear.choice.kernels() == kernel
    params = stored(linear.choice.op)
    on.group_of(linear).fill(params)
    dense = encode(torch.linspace(-2, 2, 3 * k).view(3, k), linear.choice.op.x)
    wide, scales = torch.full((3, k + 112), float("nan")).to(dense.value.dtype), torch.full((3, 4), float("nan"))
    wide[:, :k], scales[:, :1] = dense.value, dense.scale
    got = linear(Encoded(wide[:, :k], scales[:, :1]))
    assert got.shape == (3, 48)
    weight = real(params["weight"], params["weight_scale"], linear.choice.op.scheme.weight, torch.float64)
    want = dense.value.double() * dense.scale.double() @ weight.T
    assert torch.allclose(got.double(), want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))
    for other in (k - 16, k + 16):
        narrow = Encoded(dense.value.new_zeros(3, other), dense.scale)
        with pytest.raises(CheckError, match=rf"Gemm: x: expected .*\[rows, {k}\].*, got float8_e4m3fn \[3, {other}\]"):
            linear(narrow)


def test_scales_that_lie_otherwise_are_refused(calls: dict[str, int]) -> None:
    on = hal.Runtime(device("mi300x"), hal.Policy.of(check=True), registry(), place="cpu")
    linear: Any = on.bind(Gemm(columns=512, rows=48, scheme=SCHEMES["fp8_channel"]), "g", fed=True)
    on.group_of(linear).fill(stored(linear.choice.op))
    x = encode(torch.ones(3, 512), linear.choice.op.x)
    for scale in (x.scale.T, x.scale[:, 0], x.scale.bfloat16(), x.scale[:2]):
        with pytest.raises(CheckError, match=r"Gemm: scale of x: expected float32 \[3, 1\], got"):
            linear(Encoded(x.value, scale))
    with pytest.raises(CheckError, match=r"expected float8_e4m3fnuz .*, got Tensor"):
        linear(x.value)
    with pytest.raises(CheckError, match="got float8_e4m3fn"):
        linear(Encoded(x.value.view(torch.float8_e4m3fn), x.scale))
