"""Triton's kernels without a GPU: their results under the interpreter. What they compile to: test_compiled.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

pytest.importorskip("triton")

from launches import found, portable, registry
from recording import record
from triton.runtime.jit import JITFunction

import hal
from hal.conformance import Verdict

HERE = Path(__file__).parent

# module, op and name
KERNELS = [(type(k).__module__, op, k.name) for op, kernels in portable(registry()).items() for k in kernels]
MODULES = sorted({module for module, _, _ in KERNELS})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


def interpreted(device: str, pairs: list[tuple[str, str]]) -> dict[str, list[list[str]]]:
    """Verdicts of several kernels, from one process."""
    done = run(str(HERE / "interpreted.py"), device, *[word for pair in pairs for word in pair])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    found = found if isinstance(found, dict) else {" ".join(pairs[0]): found}
    for pair, verdicts in found.items():
        for case, status, detail in verdicts:
            record("interpreted", device, Verdict(*pair.split(), case, status, detail))
    return found


@pytest.mark.parametrize("module", MODULES)
def test_kernels_give_the_reference_s_results_when_interpreted(module: str) -> None:
    pairs = [(op, name) for where, op, name in KERNELS if where == module]
    for pair, verdicts in interpreted("h200", pairs).items():
        assert not [v for v in verdicts if v[1] == "failed"], pair
        assert [v for v in verdicts if v[1] == "passed"], f"{pair}: no case passed: {verdicts}"


def test_a_device_without_the_encoding_refuses_fp8_with_its_reason() -> None:
    pairs = [("SiluMul", "triton.silu_mul"), ("RMSNorm", "triton.rms_norm"), ("Quantize", "triton.quantize")]
    for pair, verdicts in interpreted("mi300x", pairs).items():
        refused = {case: detail for case, status, detail in verdicts if status == "refused" and "fp8" in case}
        assert "to fp8" in refused or pair.startswith("Quantize")
        assert all("needs fp8_e4m3fn; mi300x has False" in detail for detail in refused.values()), refused
        assert all(status == "passed" for case, status, _ in verdicts if case not in refused and "fp4" not in case)


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


def test_no_kernel_here_is_unknown_to_the_registry() -> None:
    devices = [hal.load_device(name) for name in ("h200", "mi300x")]
    used = {launch.function for device in devices for entry in found(device) for launch in entry.launches}
    package = import_module("hal_triton.code")
    for module in iter_modules(package.__path__, "hal_triton.code."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, JITFunction) and value.__name__.endswith("_kernel"):
                assert value.__name__ in used, f"{module.name}: nothing launches {value.__name__}"
