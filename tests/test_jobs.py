"""The jobs of CI: what the file of them may not say, what they demand, and that every exception is a true one."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import matrix
import pytest
from compile_kernels import ARCHS
from jobs import Cell, Job, JobError, cells, load
from sized import SIZED
from sized import cases as sized

import hal
from hal.evidence import KINDS
from hal.numerics import Class
from hal.ops import OPS

ROOT = Path(__file__).parents[1]
REPORTS = Path(__file__).parent / "reports"
JOBS, TRITONS = load()
REGISTRY = hal.Registry.installed()
GPU = [job.name for job in JOBS.values() if job.stage == "gpu"]


def broken(tmp_path: Path, text: str) -> dict[str, Job]:
    file = tmp_path / "jobs.toml"
    file.write_text(text)
    return load(file)[0]


ONE = """
tritons = []
[kinds]
[jobs.x]
stage = "host"
arch = "cpu"
runner = []
run = []
reports = []
must.ran = ["torch.copy"]
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ONE + 'imagine = "x"', "x: imagine: unknown; known are arch, devices"),
        (ONE.replace('stage = "host"\n', ""), "x: missing 1 required keyword-only argument: 'stage'"),
        (ONE.replace('"host"', '"moon"'), "x: stage is host or gpu, got 'moon'"),
        (ONE + 'like = "y"', "x: like 'y': there is no such kind"),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, said: str, tmp_path: Path) -> None:
    assert list(broken(tmp_path, ONE)) == ["x"]
    with pytest.raises(JobError, match=said):
        broken(tmp_path, text)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"must": {"ran": ("torch.copi",)}}, "x: must.ran: 'torch.copi' names no kernel"),
        ({"excepted": {"Copy triton.*": "why"}}, r"x: not: 'Copy triton.\*' names none of its cells"),
    ],
)
def test_a_glob_that_names_nothing_is_an_error(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    job = broken(tmp_path, ONE)["x"]
    assert cells(job, REGISTRY) == [Cell("Copy", "torch.copy", "ran")]
    with pytest.raises(JobError, match=said):
        cells(replace(job, **more), REGISTRY)


def test_a_kind_is_filled_in_and_what_a_job_says_replaces_it() -> None:
    found, tritons = load(REPORTS / "jobs.toml")
    job = found["gpu"]
    assert tritons == ("3.5.1", "3.9.0")
    assert job.runner == ("self-hosted", "sm_90")
    assert job.reports == ("build/sm_90.json",)
    assert list(job.excepted) == ["* rocm.*", "SiluMul cuda.*"]
    assert [str(cell) for cell in cells(job, REGISTRY)] == [
        "SiluMul torch.silu_mul", "SiluMul triton.silu_mul", "Copy torch.copy",
    ]  # fmt: skip


def test_every_job_that_is_asked_for_is_there() -> None:
    wanted = {"cpu", *(f"compile-{arch}" for arch in ARCHS)}
    wanted |= {"cuda-sm_90", "cuda-sm_100", "cuda-sm_120", "rocm-gfx942", "rocm-gfx950"}
    assert set(JOBS) == wanted
    for job in JOBS.values():
        assert set(job.must) <= set(KINDS[:5])
        assert job.name == "cpu" or job.name.endswith(job.arch)
        assert bool(job.devices) == bool(job.image) == (job.stage == "gpu")
        # every report that the gate is to read is written by a command, or by what that runs
        commands = " ".join(job.run) + (ROOT / "Makefile").read_text() * (job.run == (".ci/run",))
        assert all(report in commands for report in job.reports)


def test_extras_and_packages_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for job in JOBS.values():
        assert set(job.extras) <= set(extras)


UNSEEN = {("InProj", "cuda.pair_overlapped"): "needs a second stream, which a CPU has not"}


def test_the_cpu_s_job_names_every_kernel_there_is() -> None:
    every = {(title, name) for title, op in OPS.items() for name in REGISTRY.names(op)}
    named = {(cell.op, cell.kernel) for cell in cells(JOBS["cpu"], REGISTRY)}
    assert every - named == set(UNSEEN)


@pytest.mark.parametrize("name", GPU)
def test_a_gpu_s_job_names_kernels_of_its_vendor(name: str) -> None:
    """More than the baseline, each a cell that must have run."""
    job = JOBS[name]
    found = cells(job, REGISTRY)
    assert {cell.kind for cell in found} == {"ran"}
    counts = {backend: sum(c.kernel.startswith(f"{backend}.") for c in found) for backend in ("triton", name[:4])}
    assert min(counts.values()) >= 12, counts


def refusal(cell: Cell, device: hal.Device) -> str:
    """Why a device's facts let no case of the op run on the kernel; nothing where one can."""
    (kernel,) = (k for k in REGISTRY.kernels(OPS[cell.op]) if k.name == cell.kernel)
    asked = list(OPS[cell.op].cases())
    if (cell.op, cell.kernel) in SIZED and device.value("vendor") == "rocm":
        asked += sized(cell.op, cell.kernel, device)
    runtime = hal.Runtime(device, hal.Policy.of(), REGISTRY, load=False)
    rules = replace(hal.Policy.of(force=[f"{cell.op}={cell.kernel}"]), numerics=Class.LOSSY).at("x")
    why = ""
    # those that the kernel itself takes come first, for the others cost time
    for case in sorted(asked, key=lambda case: kernel.refuses(case.op, device) is not None):
        try:
            why = runtime.resolver.why_not(case.op, cell.kernel, case.rows, rules)
        except hal.HalError as error:
            why = str(error).splitlines()[0]
        if not why:
            return ""
    return why


@pytest.mark.parametrize("name", GPU)
def test_what_a_gpu_s_job_leaves_out_cannot_run_there_and_all_else_can(name: str) -> None:
    job = JOBS[name]
    device = hal.load_device(ARCHS[job.arch])
    every = cells(replace(job, excepted={}), REGISTRY)
    named = set(cells(job, REGISTRY))
    assert len(every) > len(named)
    for cell in every:
        assert bool(refusal(cell, device)) == (cell not in named), f"{cell}: {refusal(cell, device) or 'can run'}"


def test_what_a_compile_job_leaves_out_is_not_launched_there() -> None:
    from launches import portable, registry

    own = {(op, kernel.name) for op, found in portable(registry()).items() for kernel in found}
    for job in (job for job in JOBS.values() if job.stage == "host" and job.name != "cpu"):
        device = hal.load_device(ARCHS[job.arch])
        named = {(cell.op, cell.kernel) for cell in cells(job, REGISTRY)}
        assert named <= own
        for op, kernel in own - named:
            assert refusal(Cell(op, kernel, "compiled"), device)


def matrices(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    assert matrix.main(list(arguments)) == 0
    said = capsys.readouterr()
    lines = [line.partition("=") for line in said.out.splitlines()]
    return {name: json.loads(value)["include"] if value else [] for name, _, value in lines}, said.err


def test_the_matrix_has_each_job_once_and_gpu_s_only_where_a_runner_is(capsys: pytest.CaptureFixture[str]) -> None:
    found, said = matrices(capsys, "--runners", "sm_90 gfx950")
    assert list(found) == list(matrix.OUTPUTS)
    assert [entry["name"] for entry in found["gpu"]] == ["cuda-sm_90", "rocm-gfx950"]
    assert {entry["name"] for entry in found["host"]} == {"cpu", *(f"compile-{arch}" for arch in ARCHS)}
    assert said.splitlines() == [
        f"not run, for no runner is there: {name}" for name in ("cuda-sm_100", "cuda-sm_120", "rocm-gfx942")
    ]
    assert len({entry["file"] for entry in found["full"]}) == len(found["full"]) == len(ARCHS) * len(TRITONS)
    none, said = matrices(capsys)
    assert none["gpu"] == []
    assert len(said.splitlines()) == len(GPU)


def test_what_an_entry_of_the_matrix_says(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = matrices(capsys, "--runners", "sm_90", "--jobs", str(REPORTS / "jobs.toml"))
    assert found["gpu"] == [
        {
            "name": "gpu", "title": "gpu", "file": "gpu", "runner": ["self-hosted", "sm_90"], "image": "",
            "options": "", "python": "", "install": 'python -m pip install "torch==2.11.0" -e ".[torch]"',
            "run": "hal verify --evidence build/sm_90.json", "reports": "build/sm_90.json",
        }
    ]  # fmt: skip
    assert [(e["name"], e["title"], e["file"]) for e in found["full"]] == [
        ("compile", f"compile on Triton {triton}", f"compile-triton-{triton}") for triton in ("3.5.1", "3.9.0")
    ]
    assert found["full"][0]["install"].splitlines()[1] == "python -m pip install --no-deps triton==3.5.1"
    assert found["full"][0]["run"] == "python ci/compile_kernels.py --all --arch gfx942"


def test_a_runner_that_no_job_is_for_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main(["--runners", "sm_91"])
    assert "sm_91: no job is for it; known are gfx942, gfx950, sm_100, sm_120, sm_90" in capsys.readouterr().err


def test_scheduled_tritons_are_those_of_the_committed_tables() -> None:
    tables = {file.stem.removeprefix("triton-") for file in (jobs.FILE.parent / "compiled").glob("*.json")}
    assert {triton.rpartition(".")[0] for triton in TRITONS} == tables
