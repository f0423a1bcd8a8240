"""What a run of the tests tells of itself: the same from one process and from two, nothing where it was cut short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hal
from hal.evidence import Evidence, Row, Skipped, read

ROOT = Path(__file__).parents[1]
MADE = """
import pytest
import hal
from facts import device
from emulated import registry
from hal.conformance import Verdict, verify_kernel
from hal.ops import AddRMSNorm, Copy, Gemm, SiluMul
from recording import record

def on(name):
    return hal.Runtime(device(name), hal.Policy(), place="cpu")

@pytest.mark.parametrize("again", [0, 1])
def test_own(again):
    assert {v.status for v in verify_kernel(on("cpu"), Copy, "torch.copy")} == {"passed"}

def test_other_facts():
    assert {v.status for v in verify_kernel(on("h200"), Copy, "torch.copy")} == {"passed"}

def test_a_library_s():
    runtime = hal.Runtime(device("mi300x"), hal.Policy(), registry(), place="cpu")
    found = list(verify_kernel(runtime, Gemm, "rocm.gemm"))
    assert "failed" not in {v.status for v in found}

def test_told():
    record("interpreted", "h200", Verdict("SiluMul", "triton.silu_mul", "rows", "passed"))
    record("interpreted", "h200", Verdict("SiluMul", "nobody.silu_mul", "rows", "passed"))

@pytest.mark.spoils
def test_wrong_on_purpose(monkeypatch):
    monkeypatch.setattr("hal_torch.code.small.silu_mul", lambda site: None)
    assert "failed" in {v.status for v in verify_kernel(on("cpu"), SiluMul, "torch.silu_mul")}
    fall()

def fall():
    facts = device("mi300x", aiter=None)
    hal.Runtime(facts, hal.Policy(), registry(), place="cpu").bind(AddRMSNorm(hidden=64), "norm")

def test_falls_back():
    fall()

def test_resolves_what_falls_back():
    facts = device("mi300x", aiter=None)
    hal.Runtime(facts, hal.Policy(), registry(), load=False).bind(SiluMul(columns=64), "act")

def test_skipped():
    pytest.skip("no reason at all")

def test_wrong():
    assert False

@pytest.fixture
def torn():
    yield
    assert False

def test_wrong_at_its_end(torn):
    pass
"""


def ran(tmp_path: Path, made: str, *options: str) -> tuple[int, Path]:
    file, report = tmp_path / "test_made.py", tmp_path / "made" / "e.json"
    file.write_text(made)
    report.parent.mkdir(exist_ok=True)
    report.write_text("of another run")
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    env = {**os.environ, "HAL_EVIDENCE": str(report), "PYTHONPATH": path}
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "conftest",
        *options,
        str(file),
    ]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    return done.returncode, report


@pytest.mark.parametrize("count", [0, 2])
def test_a_run_tells_what_it_saw(count: int, tmp_path: Path) -> None:
    options = ("-n", str(count)) if count else ("-p", "no:xdist")
    status, report = ran(tmp_path, MADE, *options)
    assert status == 1
    found = read(report)
    assert isinstance(found, Evidence)
    assert found.arch == "cpu"
    assert found.stack["torch"]
    cases = len(hal.ops.Copy.cases())
    (library,) = (row for row in found.rows if row.kernel == "rocm.gemm")
    assert (library.op, library.kind, library.on) == ("Gemm", "emulated", "mi300x")
    assert set(found.rows) - {library} == {
        Row("Copy", "torch.copy", "ran", cases),
        Row("Copy", "torch.copy", "ran", cases, on="h200"),
        Row("SiluMul", "triton.silu_mul", "interpreted", 1, on="h200"),
    }
    assert [(f.op, f.kernel) for f in found.fell_back] == [("AddRMSNorm", "torch.add_rms_norm")]
    assert "::test_falls_back" in found.fell_back[0].why
    assert (found.tests.passed, found.tests.failed) == (8, 2)
    (skipped,) = found.tests.skipped
    assert skipped.test.endswith("::test_skipped")
    assert skipped == Skipped(skipped.test, "no reason at all")


@pytest.mark.parametrize("made", ["raise KeyboardInterrupt", "import nothing_of_this_name"])
def test_a_run_that_was_cut_short_leaves_no_report(made: str, tmp_path: Path) -> None:
    status, report = ran(tmp_path, made, "-p", "no:xdist")
    assert status == 2
    assert not report.exists()
