"""Timing: problems that are sound and rotate, what is printed of them, others' kernels beside ours."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hal
from hal.bench import microseconds, problem
from hal.cli import main
from hal.ops import OPS, AttentionDecode, GatedDeltaDecode, SiluMul

OPS_OF_ROWS = [op for title, op in OPS.items() if title not in ("GatedDeltaVerify", "AllReduce", "AllGather")]


@pytest.fixture(scope="module")
def runtime() -> hal.Runtime:
    return hal.Runtime(hal.load_device("cpu"), hal.Policy())


@pytest.mark.parametrize("op", OPS_OF_ROWS, ids=lambda op: op.title())
def test_a_problem_of_any_op_is_one_that_the_op_takes(op: Any, runtime: hal.Runtime) -> None:
    size = op.cases()[0].op
    kernel = runtime.resolver.resolve((size,))[0].at(3).kernel.name
    found = problem(runtime, size, kernel, 3, context=5, rotated=1)
    (args,), (pools,) = found.args, found.states
    rest = [*((pools,) if size.signature().state else ()), *((found.batch,) if found.batch else ())]
    size.check(*args, *rest)
    found.calls[0]()


def test_copies_move_as_much_as_asked_in_memory_of_their_own(runtime: hal.Runtime) -> None:
    op = GatedDeltaDecode(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8)
    found = problem(runtime, op, "torch.decode", 2, rotated=10 * op.traffic(2).bytes)
    assert len(found.calls) == len(found.args) == len(found.params) == 10
    assert found.bytes == op.traffic(2).bytes
    for tensors in (
        [pools[1] for pools in found.states],
        [args[0][0] for args in found.args],
        [params["conv_q"] for params in found.params],
    ):
        assert len({t.data_ptr() for t in tensors}) == 10


def test_attention_reads_the_keys_and_values_of_its_context(runtime: hal.Runtime) -> None:
    op = AttentionDecode(heads=4, kv_heads=2, head_dim=16, page_size=4)
    short, long = (problem(runtime, op, "torch.attention_decode", 3, context=n, rotated=1).bytes for n in (10, 20))
    assert long - short == 3 * 10 * 2 * 2 * 16 * 2


def test_a_kernel_that_is_not_for_the_problem_says_why(runtime: hal.Runtime) -> None:
    with pytest.raises(hal.HalError, match=r"triton\.silu_mul .* needs vendor cuda or rocm; cpu has"):
        problem(runtime, SiluMul(columns=8), "triton.silu_mul", 2)


def test_a_call_is_timed_by_what_more_rounds_add(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("hal.bench.timing.time.perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += 7e-6

    eager: Any = SimpleNamespace(can_capture=False)
    assert microseconds(eager, [call] * 5) == pytest.approx(7.0)


def results(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", *words, "--rotate", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_every_kernel_is_listed_timed_or_with_its_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter.py").write_text("def others(problem):\n    return {'other': problem.calls}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "bench.json"
    answer = results(capsys, "SiluMul", "--rows", "2,3", "--peers", "adapter:others", "--out", str(out))
    assert answer == json.loads(out.read_text())
    assert answer["schema"] == "hal.bench/1"
    assert answer["facts"]["torch"] == torch.__version__
    rows = {(r["rows"], r["kernel"]): r for r in answer["results"]}
    assert set(rows) == {(n, k) for n in (2, 3) for k in (*hal.Registry.installed().names(SiluMul), "other")}
    assert rows[2, "torch.silu_mul"]["chosen"]
    assert rows[2, "torch.silu_mul"]["us"] > 0
    assert rows[2, "torch.silu_mul"]["bytes"] == 2 * 48 * 3 * 2
    assert rows[2, "triton.silu_mul"]["us"] is None
    assert rows[2, "triton.silu_mul"]["reason"].startswith("needs vendor cuda or rocm; ")
    assert rows[2, "other"]["us"] > 0


def test_problems_come_from_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    answer = results(capsys, "SiluMul", "--model", "qwen3.5-0.8b", "--tp", "2", "--rows", "1")
    (found,) = {json.dumps(r["problem"]) for r in answer["results"]}
    assert json.loads(found)["columns"] == 3584 // 2


def test_what_cannot_be_timed_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["MoE", "--model", "qwen3.5-0.8b"], "qwen3.5-0.8b has no MoE on"),
        (["SiluMul", "--kernel", "torch.none"], "SiluMul: no kernel torch.none; it has "),
        (["SiluMul", "--peers", "nowhere:f"], "--peers nowhere:f: No module named 'nowhere'"),
    ):
        assert main(["bench", *words, "--rows", "1", "--rotate", "1"]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_it_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results(capsys, "SiluMul", "--rows", "1,2", "--plot", str(tmp_path / "bench.png"))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "SiluMul", "--rows", "1", "--rotate", "1", "--plot", str(tmp_path / "x.png")]) == 1
    assert "--plot draws with matplotlib: " in capsys.readouterr().err


def test_a_whole_model_is_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "e2e.json"
    words = ["--batches", "1,2", "--prompt", "4", "--outputs", "3", "--long", "8", "--profile", "--json"]
    assert main(["bench", "e2e", "--model", "tiny-dense", *words, "--out", str(out)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads(out.read_text())
    assert (answer["schema"], answer["model"]) == ("hal.bench.e2e/1", "tiny-dense")
    assert [r.get("batch", r.get("prefill")) for r in answer["rows"]] == [1, 2, 8]
    assert all(r["ms"] > 0 for r in answer["rows"])
    assert main(["bench", "e2e", "--outputs", "1"]) == 1
    assert "--outputs is 2 or more, got 1" in capsys.readouterr().err
