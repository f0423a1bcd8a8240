"""Triton's kernels without a GPU: their results under the interpreter, their code compiled for absent chips."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import hal
from hal.conformance import verify_kernel
from hal.ops import OPS
from hal.registry import Registry

HERE = Path(__file__).parent
TARGETS = {"h200": GPUTarget("cuda", 90, 32), "mi300x": GPUTarget("hip", "gfx942", 64)}
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8",
}  # fmt: skip


def portable() -> Iterator[tuple[str, str, str]]:
    """Module, op and name of the kernels that are written here; libraries' own are for their GPUs."""
    registry = Registry.installed()
    for title, op in OPS.items():
        for kernel in registry.kernels(op):
            if type(kernel).__module__.startswith("hal_triton.") and kernel.tier != "library":
                yield type(kernel).__module__, title, kernel.name


KERNELS = list(portable())
MODULES = sorted({module for module, _, _ in KERNELS})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


def interpreted(device: str, pairs: list[tuple[str, str]]) -> dict[str, list[list[str]]]:
    """Verdicts of several kernels, from one process."""
    done = run(str(HERE / "interpreted.py"), device, *[word for pair in pairs for word in pair])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return found if isinstance(found, dict) else {" ".join(pairs[0]): found}


@pytest.mark.parametrize("module", MODULES)
def test_kernels_give_the_reference_s_results_when_interpreted(module: str) -> None:
    pairs = [(op, name) for where, op, name in KERNELS if where == module]
    for pair, verdicts in interpreted("h200", pairs).items():
        assert not [v for v in verdicts if v[1] == "failed"], pair
        assert [v for v in verdicts if v[1] == "passed"], f"{pair}: no case passed: {verdicts}"


def test_a_device_without_the_encoding_refuses_fp8_with_its_reason() -> None:
    pairs = [("SiluMul", "triton.silu_mul"), ("RMSNorm", "triton.rms_norm"), ("Quantize", "triton.quantize")]
    for pair, verdicts in interpreted("mi300x", pairs).items():
        refused = {case: detail for case, status, detail in verdicts if status == "refused"}
        assert "to fp8" in refused or pair.startswith("Quantize")
        assert all("needs fp8_e4m3fn; mi300x has False" in detail for detail in refused.values()), refused
        assert all(status == "passed" for case, status, _ in verdicts if case not in refused)


def test_the_interpreter_is_not_trusted_without_the_hook() -> None:
    done = run("-c", "import interpreted; interpreted.check()")
    assert done.returncode != 0
    assert "the hook is gone" in done.stderr
    assert run("-c", "import interpreted; interpreted.install(); interpreted.check()").returncode == 0


FAR = """
import interpreted
interpreted.install()
import json, dataclasses, torch, hal
from hal.conformance import run
from hal.ops import QKNormRope
from hal.ops.base import Case

class Far(QKNormRope):
    def adjust(self, variant, problem):
        problem.batch.positions = torch.tensor([262143, 262142, 200001, 0, -5])

run.SHARE["float32"] = 2.0 ** -21
op = QKNormRope(heads=2, kv_heads=1, head_dim=128, rotary_dim=64, theta=1e7, sections=(11, 11, 10), dtype="float32")
far = Far(**{f.name: getattr(op, f.name) for f in dataclasses.fields(op)})
case = Case("far", op, (5,), (0,), (0,), "", "prefill")
make = run.make
def made(case, seed=0):
    inputs = make(case, seed)
    far.adjust("", inputs.problem)
    return inputs
run.make = made
QKNormRope.cases = classmethod(lambda cls: [case])
runtime = hal.Runtime(hal.load_device("h200").replaced(pdl=False), hal.Policy(), place="cpu")
names = ("triton.qk_norm_rope", "triton.qk_norm_rope_tiled")
print(json.dumps([[v.status, v.detail] for name in names for v in run.verify_kernel(runtime, QKNormRope, name)]))
"""


def test_rotation_at_position_262143_is_as_exact_as_at_zero() -> None:
    done = run("-c", FAR)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["passed", ""]] * 2


def test_a_frequency_in_fixed_point_is_within_float64_of_the_true_one() -> None:
    from fractions import Fraction
    from math import pi

    from hal_triton.code.rope import turns

    table = turns(1e7, 64)
    assert all(0 < t < 2**63 for t in table)
    for i, t in enumerate(table):
        true = Fraction(1e7 ** (-2 * i / 64)) / Fraction(2 * pi)
        assert abs(Fraction(t, 2**64) - true) * 262144 < 1e-9


class Recorder:
    """Takes the place of every launch: keeps what was launched, each specialisation once."""

    def __init__(self) -> None:
        self.launches: dict[Any, tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]] = {}

    def __call__(self, fn: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {n: kwargs[n] for n in ("num_warps", "num_stages") if n in kwargs}
        given = dict(zip(fn.arg_names, args, strict=False)) | {n: v for n, v in kwargs.items() if n in fn.arg_names}
        for name, parameter in inspect.signature(fn.fn).parameters.items():
            if name not in given:
                given[name] = parameter.default
        constants = {p.name: given[p.name] for p in fn.params if p.is_constexpr or given[p.name] is None}
        signature = {n: "constexpr" if n in constants else kind(given[n]) for n in fn.arg_names}
        key = (fn, tuple(signature.items()), str(constants), tuple(options.items()))
        self.launches.setdefault(key, (fn, signature, constants, options))


def kind(value: Any) -> str:
    """An argument's type as the compiler writes it."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def compiled(launch: tuple[Any, dict[str, str], dict[str, Any], dict[str, int]], target: GPUTarget) -> str:
    fn, signature, constants, options = launch
    pointers = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(fn.arg_names) if signature[n].startswith("*")}
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=pointers)
    done = triton.compile(source, target=target, options=options)
    return str(done.asm["ptx" if target.backend == "cuda" else "amdgcn"])


@cache
def launched(module: str, device: str) -> tuple[Any, ...]:
    """What the kernels of a module launch for their ops' cases. Nothing runs: the verdicts are void."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda self, *args, **kwargs: recorder(self, *args, **kwargs))
        for where, op, name in KERNELS:
            if where == module:
                runtime = hal.Runtime(hal.load_device(device), hal.Policy(), place="cpu")
                list(verify_kernel(runtime, OPS[op], name, strided=False))
    return tuple(recorder.launches.values())


@pytest.mark.parametrize("device", TARGETS)
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_for_chips_that_are_not_here(module: str, device: str) -> None:
    launches = launched(module, device)
    assert launches
    for launch in launches:
        assert launch[0].__name__ in compiled(launch, TARGETS[device])


def test_no_kernel_here_is_unknown_to_the_registry() -> None:
    used = {fn.__name__ for module in MODULES for fn, *_ in launched(module, "h200")}
    package = import_module("hal_triton.code")
    for found in iter_modules(package.__path__, "hal_triton.code."):
        for value in vars(import_module(found.name)).values():
            if isinstance(value, JITFunction) and value.__name__.endswith("_kernel"):
                assert value.__name__ in used, f"{found.name}: nothing launches {value.__name__}"
