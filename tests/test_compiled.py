"""Compiled: the portable kernels for six chips that are not here, and what a compiler's figures must not say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import compile_kernels
from compile_kernels import ARCHS, SCHEMA, Child, compile_all, digest, faults, jobs, read, table_file
from launches import recorded

import hal

TABLES = sorted((Path(compile_kernels.__file__).parent / "compiled").glob("triton-*.json"))


def shared(arch: str) -> int:
    found: int = hal.load_device(ARCHS[arch]).value("shared_bytes")
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_first_settings_and_whatever_the_table_does_not_hold_compile_and_fit(arch: str) -> None:
    known = read(table_file()).get(arch, {})
    wanted = jobs(arch)
    assert 150 < len(wanted) <= 800
    unknown = [job for job in wanted if known and job.key not in known]
    made = compile_all({job.key: job for job in [*unknown, *(j for j in wanted if j.first)]}.values(), 1)
    assert len(made) >= 50
    wrong = {row["constants"]: found for row in made.values() if (found := faults(row, shared(arch)))}
    assert not wrong
    for row in made.values():
        assert row.get("vgpr_count" if arch.startswith("gfx") else "registers", 0) > 0


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
def test_the_committed_tables_have_every_chip_and_no_fault(file: Path) -> None:
    table = json.loads(file.read_text())
    assert table["schema"] == SCHEMA
    assert file.stem == "triton-" + ".".join(table["triton"].split(".")[:2])
    assert set(table["rows"]) == set(ARCHS)
    for arch, rows in table["rows"].items():
        assert 150 < len(rows) <= 800
        assert not [(row["function"], found) for row in rows.values() if (found := faults(row, shared(arch)))]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"shared": 65536, "vgpr_spill_count": 0, "sgpr_spill_count": 9}, []),
        ({"shared": 65537}, ["asks for 65537 bytes of shared memory; the chip has 65536"]),
        ({"shared": 0, "vgpr_spill_count": 3}, ["spills 3 vector registers"]),
        ({"error": "printed x: error: bad"}, ["printed x: error: bad"]),
    ],
)
def test_what_is_a_fault(row: dict[str, Any], said: list[str]) -> None:
    assert faults(row, 65536) == said


def worker(figures: str) -> dict[str, Any]:
    code = f"import os, compile_kernels as c; c.figures = lambda asked: {figures}; c.worker()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], input="{}\n", text=True, capture_output=True, env=env, check=True
    )
    return dict(json.loads(done.stdout))


def test_an_error_that_is_only_printed_is_an_error() -> None:
    printed = r"os.write(2, b'fine\n<unknown>:0:0: error: ran out of registers\n') and {'shared': 0}"
    assert worker(printed) == {"error": "printed <unknown>:0:0: error: ran out of registers"}
    assert worker("os.write(2, b'warning: slow\\n') and {'shared': 7}") == {"shared": 7}
    assert worker("1 / 0") == {"error": "ZeroDivisionError: division by zero"}
    assert worker("os.write(1, b'words of a library') and {'shared': 8}") == {"shared": 8}


def test_a_compiler_that_dies_is_an_error_and_the_next_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import json, os\nif 'die' in json.loads(input()): os.abort()\nprint('{}')\n")
    monkeypatch.setattr(compile_kernels, "__file__", str(script))
    child = Child(str(tmp_path))
    assert child.ask({"die": 1}) == {"error": "the compiler ended its process with status -6"}
    assert child.ask({}) == {}


def test_a_row_is_known_by_its_sources_and_arguments() -> None:
    (job, other), function = [j for j in jobs("gfx942") if j.launch.function == "prefill_kernel"][:2], "attend"
    assert job.key != other.key
    assert digest(job.launch) == job.key
    from hal_triton.code import attention

    known = compile_kernels._sources(attention.prefill_kernel, {})
    assert f"hal_triton.code.attention.{function}" in known
    assert "hal_triton.code.parts.begin" in known


def test_a_launch_is_specialised_as_triton_would() -> None:
    import torch
    from hal_triton.code.linear import sum_kernel
    from hal_triton.code.small import embed_kernel

    x = torch.empty(4, 8)
    with recorded() as launches:
        sum_kernel[(1,)](x, x, 32, SPLIT=2, BLOCK=256, PDL=False, num_warps=2)
        embed_kernel[(1,)](x, x, x, x, 1, VOCAB=5, HIDDEN=8, BLOCK=8, PDL=False)
    first, second = launches
    # a number that is not to be specialised, whatever it is; and a one
    assert first.signature["count"] == "i32"
    assert first.aligned == ("partial_ptr", "out_ptr")
    assert first.options == {"num_warps": 2}
    assert second.constants["first"] == 1
    assert second.signature["first"] == "constexpr"
