"""Evidence files: written and read alike, torn ones with what is wrong where, older reports converted."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import compile_kernels
import evidence as converter
import pytest
from emulated import registry
from facts import device

import hal
from hal.cli import main
from hal.conformance import Verdict, fallbacks
from hal.errors import HalError
from hal.evidence import Evidence, FellBack, Row, Skipped, Suite, merged, read, rows_of, strongest, write
from hal.ops import AddRMSNorm, Copy, SiluMul

ROOT = Path(__file__).parents[1]
FULL = Evidence(
    "NVIDIA H200", "sm_90", "2026-12-03", job="cuda-sm_90", stack={"torch": "2.11.0"},
    rows=(Row("Linear", "torch.linear", "ran", 5), Row("Copy", "torch.copy", "failed", 1, "off by 3", "h200")),
    fell_back=(FellBack("Gemm", "torch.gemm", "no aiter"),),
    tests=Suite(7, 1, (Skipped("tests/test_x.py::test_y", "needs a GPU"),)), note="one process",
)  # fmt: skip


@pytest.mark.parametrize("given", [FULL, Evidence("cpu", "cpu", "2026-01-31")])
def test_what_is_written_is_read(given: Evidence, tmp_path: Path) -> None:
    write(given, tmp_path / "e.json")
    assert read(tmp_path / "e.json") == given
    # a row a line
    assert sum('"op": "Linear"' in line for line in (tmp_path / "e.json").read_text().splitlines()) == bool(given.rows)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "hal.evidence/0"}, "schema is hal.evidence/1, got 'hal.evidence/0'"),
        ({"arch": None}, "arch: expected str, got None"),
        ({"date": "3 December"}, "date: expected a day as 2026-01-31, got '3 December'"),
        ({"rows": {}}, "rows: expected a list, got {}"),
        ({"rows": [7]}, r"rows\[0\]: expected an object, got 7"),
        ({"rows": [{"op": "Copy", "kind": "ran"}]}, r"rows\[0\]: missing 2 required .*'kernel' and 'cases'"),
        ({"rows": [{"op": "A", "kernel": "b", "kind": "run", "cases": 1}]}, r"rows\[0\].kind: expected ran \| .*'run'"),
        ({"rows": [{"op": "A", "kernel": "b", "kind": "ran", "cases": 0}]}, r"rows\[0\].cases: expected 1 or more"),
        ({"rows": [{"op": "A", "kernel": "b", "kind": "ran", "cases": True}]}, r"rows\[0\].cases: expected int, got T"),
        ({"rows": [{"op": "A", "kernel": "b", "kind": "refused", "cases": 1}]}, r"rows\[0\].why: .* says why"),
        ({"tests": {"skipped": [{"test": "t"}]}}, r"tests.skipped\[0\]: missing 1 .*'why'"),
        ({"fallen": []}, "fallen: unknown; known are device, arch"),
    ],
)
def test_a_file_that_is_wrong_says_where(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    write(FULL, file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(HalError, match=f"e.json: {said}"):
        read(file)


def test_a_torn_file_and_one_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    with pytest.raises(HalError, match=r"e\.json: cannot be read as a hal\.evidence/1 file"):
        read(file)
    write(FULL, file)
    file.write_text(file.read_text()[:-20])
    with pytest.raises(HalError, match=r"e\.json: cannot be read as a hal\.evidence/1 file"):
        read(file)


def test_the_strongest_of_several() -> None:
    order = ["failed", "refused", "resolved", "compiled", "interpreted", "emulated", "ran"]
    rows = [Row("Linear", "a.b", kind, 1, "why") for kind in order]
    for most in range(2, len(rows)):
        assert strongest(rows[: most + 1]) == rows[most]
    assert strongest(rows[:2]) is None
    first, second = (Row("Linear", "a.b", "ran", n) for n in (1, 2))
    assert strongest([rows[3], first, second]) is first


def test_verdicts_of_one_kernel_are_a_row_for_each_kind() -> None:
    said = [("a", "passed", ""), ("b", "failed", "off"), ("c", "passed", ""), ("d", "refused", "fp8")]
    verdicts = [Verdict("Linear", "x.y", case, status, detail) for case, status, detail in said]  # type: ignore[arg-type]
    refused = Verdict("Linear", "x.z", "a", "refused", "needs fp8")
    assert rows_of([*verdicts, refused], "emulated", "mi300x") == (
        Row("Linear", "x.y", "emulated", 2, on="mi300x"),
        Row("Linear", "x.y", "failed", 1, "off", "mi300x"),
        Row("Linear", "x.z", "refused", 1, "needs fp8", "mi300x"),
    )


def test_rows_of_several_runs_add_up_and_a_refusal_stands_only_alone() -> None:
    row, refused = Row("A", "b", "ran", 2), Row("A", "b", "refused", 9, "small")
    assert merged([refused, row, row]) == (replace(row, cases=4),)
    assert merged([replace(refused, on="h200"), row]) == (row, replace(refused, on="h200"))


def test_the_committed_report_of_an_h200_is_evidence() -> None:
    (found,) = converter.converted(ROOT / "bench/results/verify-h200.json", "2026-12-03").values()
    assert (found.device, found.arch, found.stack["triton"]) == ("NVIDIA H200", "sm_90", "3.6.0")
    rows = {(row.op, row.kernel): row for row in found.rows}
    assert rows["GatedDeltaDecode", "cuda.decode_cluster"] == Row("GatedDeltaDecode", "cuda.decode_cluster", "ran", 9)
    assert rows["AddRMSNorm", "composed.reduce_norm"].kind == "refused"


def test_committed_tables_of_compilers_are_evidence_by_architecture(tmp_path: Path) -> None:
    table = ROOT / "ci/compiled/triton-3.6.json"
    assert converter.main([str(table), "--date", "2026-12-03", "--out", str(tmp_path)]) == 0
    found = {e.arch: e for e in map(read, tmp_path.glob("*.json"))}
    assert set(found) == set(json.loads(table.read_text())["rows"])
    for evidence in found.values():
        assert {row.kind for row in evidence.rows} == {"compiled"}
        assert len(evidence.rows) > 20


def test_a_launch_that_spills_is_no_evidence_for_its_kernel() -> None:
    good = {"function": "f", "kernels": ["A t.x", "B t.y"], "constants": "N=1", "shared": 0}
    bad = {**good, "kernels": ["A t.x"], "vgpr_spill_count": 3}
    assert converter.compiled_rows([good, bad, good], 100) == (
        Row("A", "t.x", "compiled", 2),
        Row("A", "t.x", "failed", 1, "f N=1: spills 3 vector registers"),
        Row("B", "t.y", "compiled", 2),
    )


def test_another_report_is_an_error_that_names_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"schema": "hal.bench/1"}')
    with pytest.raises(HalError, match=r"schema is hal.verify.report/1 or hal.compiled/1, got 'hal.bench/1'"):
        converter.converted(tmp_path / "r.json", "2026-12-03")


def test_verify_writes_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.json"
    assert main(["verify", "Copy", "AddRMSNorm", "--evidence", str(file)]) == 0
    found = read(file)
    assert (found.arch, found.date, found.fell_back) == ("cpu", date.today().isoformat(), ())
    rows = {(row.op, row.kernel): row for row in found.rows}
    assert rows["Copy", "torch.copy"] == Row("Copy", "torch.copy", "ran", len(Copy.cases()))
    assert rows["AddRMSNorm", "triton.add_rms_norm"].kind == "refused"
    assert "more than one rank" in rows["AddRMSNorm", "composed.reduce_norm"].why
    assert main(["verify", "Copy", "--evidence", str(tmp_path / "no" / "e.json")]) == 1
    assert f"--evidence {tmp_path}/no/e.json: there is no folder" in capsys.readouterr().err


@pytest.mark.spoils
def test_verify_writes_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(site: Any) -> Any:
        return lambda x: x + 1

    monkeypatch.setattr("hal_torch.code.small.copy", broken)
    assert main(["verify", "Copy", "--evidence", str(tmp_path / "e.json")]) == 1
    (row,) = (row for row in read(tmp_path / "e.json").rows if row.kernel == "torch.copy" and row.kind == "failed")
    assert row.cases >= 2
    assert "EXACT" in row.why


def test_what_falls_back_is_told_by_op_and_kernel() -> None:
    with_aiter = hal.Runtime(device("mi300x"), hal.Policy(), registry(), load=False)
    assert fallbacks(with_aiter, [AddRMSNorm, Copy]) == ()
    without = hal.Runtime(device("mi300x", aiter=None), hal.Policy(), registry(), load=False)
    found = {fell.kernel: fell for fell in fallbacks(without, [Copy, SiluMul])}
    assert set(found) == {"torch.silu_mul", "composed.then_quantize"}
    assert found["torch.silu_mul"].op == "SiluMul"
    assert "rocm.silu_mul" in found["torch.silu_mul"].why
    (none,) = fallbacks(hal.Runtime(device("cpu"), hal.Policy(), hal.Registry(), load=False), [Copy])
    assert (none.op, none.kernel) == ("Copy", "no kernel")


def test_the_compiler_tells_of_one_chip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arches in ([], ["--arch", "sm_90", "--arch", "gfx942"]):
        with pytest.raises(SystemExit):
            compile_kernels.main([*arches, "--evidence", str(tmp_path / "e.json")])
        assert "give one --arch" in capsys.readouterr().err
    made = {
        "a": {"function": "f", "kernels": ["SiluMul triton.silu_mul"], "constants": "N=1", "shared": 0},
        "b": {"function": "f", "kernels": ["Copy triton.copy"], "constants": "N=2", "error": "ran out of registers"},
    }
    compile_kernels._tell("gfx950", made, tmp_path / "made" / "e.json")
    found = read(tmp_path / "made" / "e.json")
    assert (found.device, found.arch, list(found.stack)) == ("mi355x", "gfx950", ["triton"])
    assert found.rows == (
        Row("Copy", "triton.copy", "failed", 1, "f N=2: ran out of registers"),
        Row("SiluMul", "triton.silu_mul", "compiled", 1),
    )
