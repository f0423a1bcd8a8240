"""The gate on recorded reports: a good one passes, and each bad one fails with what is wrong and nothing else."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import gate
import pytest
from jobs import Job

import hal
from hal.evidence import Evidence, Row, read, write

REPORTS = Path(__file__).parent / "reports"
CELLS = ("SiluMul torch.silu_mul", "SiluMul triton.silu_mul", "Copy torch.copy")
NOTHING = [f"{cell}: ran is asked, there is nothing" for cell in CELLS]
WRONG = {
    "baseline": ["SiluMul triton.silu_mul: ran is asked, there is nothing"],
    "interpreted": ["SiluMul triton.silu_mul: ran is asked, there is interpreted on h200, compiled"],
    "refused": ["SiluMul triton.silu_mul: ran is asked, there is refused: needs triton >=3.5; here has none"],
    "on-the-host": ["Copy torch.copy: ran is asked, there is ran on cpu"],
    "failed-case": ["SiluMul triton.silu_mul: failed: x: off by 0.5, allowed 0.01"],
    "failed-test": ["1 tests failed"],
    "no-tests": ["no test passed"],
    "fell-back": [
        "SiluMul torch.silu_mul: fell back: with all software met would run rows 1..: "
        "cuda.flashinfer_silu_mul (needs flashinfer)"
    ],
    "skipped": [
        "tests/test_gpu.py::test_tokens: skipped, and the job does not list why: "
        "needs a GPU; its report stands in bench/results"
    ],
    "wrong-arch": ["wrong-arch.json: is of NVIDIA B200 (sm_100); the job is for sm_90"],
    "wrong-device": ["wrong-device.json: is of NVIDIA GH200 480GB; the job is for NVIDIA H200*"],
    "other-job": ["other-job.json: is of job compile, not gpu"],
    "old": ["old.json: is of 2026-11-30; only what ran since 2026-12-02 counts"],
    "empty": ["empty.json: is empty", *NOTHING, "no test passed"],
    "schema": [
        "schema.json: schema is hal.evidence/1, got 'hal.evidence/0'",
        *NOTHING,
        "there is no report to judge",
        "no test passed",
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPORTS)


def judge(capsys: pytest.CaptureFixture[str], *reports: str, job: str = "gpu") -> tuple[int, list[str]]:
    status = gate.main([job, *reports, "--jobs", "jobs.toml", "--since", "2026-12-02"])
    return status, [line.removeprefix(f"{job}: ") for line in capsys.readouterr().out.splitlines()]


def test_a_good_report_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(capsys, "good.json") == (0, ["all 3 cells were exercised, 12 tests passed"])


@pytest.mark.parametrize("report", WRONG)
def test_a_bad_report_fails_with_what_is_wrong(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(capsys, f"{report}.json") == (1, [*WRONG[report], "does not pass"])


def test_a_torn_report_fails_and_so_does_none(capsys: pytest.CaptureFixture[str]) -> None:
    status, (first, *rest) = judge(capsys, "torn.json")
    assert first.startswith("torn.json: cannot be read as a hal.evidence/1 file")
    assert (status, rest) == (1, [*NOTHING, "there is no report to judge", "no test passed", "does not pass"])
    assert judge(capsys) == (status, rest)
    assert judge(capsys, "good.json", "torn.json") == (1, [first, "does not pass"])


def test_every_recorded_report_is_judged_here() -> None:
    assert {file.stem for file in REPORTS.glob("*.json")} == {"good", "torn", *WRONG}


def test_reports_of_one_job_add_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What one lacks another may have; what one says is wrong stays wrong."""
    write(
        Evidence("NVIDIA H200", "sm_90", "2026-12-03", rows=(Row("SiluMul", "triton.silu_mul", "ran", 1),)),
        tmp_path / "e",
    )
    assert judge(capsys, "baseline.json", str(tmp_path / "e"))[0] == 0
    assert judge(capsys, "good.json", "failed-case.json") == (1, [*WRONG["failed-case"], "does not pass"])


def test_another_job_wants_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = judge(capsys, "good.json", job="compile")
    assert status == 1
    assert "SiluMul triton.silu_mul: compiled is asked, there is ran" in said


def test_a_report_counts_from_the_day_before(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    today = date.today()
    given = read(REPORTS / "good.json")
    for days, status in ((0, 0), (2, 1)):
        day = (today - timedelta(days=days)).isoformat()
        write(Evidence(**{**vars(given), "date": day}), tmp_path / "e.json")
        assert gate.main(["gpu", str(tmp_path / "e.json"), "--jobs", "jobs.toml"]) == status
    assert "only what ran since" in capsys.readouterr().out


def test_a_job_without_cells_does_not_pass() -> None:
    job = Job(name="x", stage="gpu", arch="sm_90", runner=(), run=(), reports=(), must={})
    assert (
        gate.judged(job, [], [("good.json", read(Path("good.json")))], date(2026, 12, 1))
        == [
            "the job names no cell",
            "tests/test_gpu.py::test_ranks: skipped, and the job does not list why: needs two GPUs; there is 1",
        ][::-1]
    )


def test_a_broken_backend_is_not_a_shorter_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = hal.registry.discover()
    broken = [hal.registry.Broken("triton", "ImportError: no libtriton")]
    monkeypatch.setattr("hal.registry.discover", lambda: ([b for b in found if b.name != "triton"], broken))
    status, said = judge(capsys, "good.json")
    assert (status, said[0]) == (1, "backend triton is broken: ImportError: no libtriton")


def test_an_unknown_job_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        judge(capsys, "good.json", job="gpus")
    assert "unknown job 'gpus'; known are gpu, compile" in capsys.readouterr().err
