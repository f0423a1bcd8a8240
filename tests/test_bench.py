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
from hal.bench.timing import _least
from hal.cli import main
from hal.formats import Quantized
from hal.ops import (
    OPS,
    AddRMSNorm,
    AllGather,
    AllReduce,
    AttentionDecode,
    Embed,
    GatedDeltaDecode,
    NormGateUp,
    QKNormRope,
    SiluMul,
)
from hal.ops.move import COLLECTIVES

OPS_OF_ROWS = [op for op in OPS.values() if op not in COLLECTIVES]
MODULE = sys.modules["hal.bench.problem"]  # the package calls the function so


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


@pytest.mark.parametrize(
    "op", [Embed(vocab=4000, hidden=64), QKNormRope(heads=4, kv_heads=4, head_dim=32, rotary_dim=16, theta=1e4)]
)
def test_copies_hold_no_more_memory_than_they_may(op: Any, runtime: hal.Runtime, monkeypatch: Any) -> None:
    kernel = runtime.resolver.resolve((op,))[0].at(2).kernel.name
    one = problem(runtime, op, kernel, 2, rotated=1)
    assert len(problem(runtime, op, kernel, 2).calls) == MODULE.MOST_COPIES
    # parameters twice: as the kernel reads them, and as they are; the little that arguments hold is in the half
    size = 2 * sum(p.nbytes for p in one.params[0].values()) + sum(pool.nbytes for pool in one.states[0])
    for count in (1, 3):
        monkeypatch.setattr(MODULE, "HELD", int(size * (count + 0.5)))
        assert len(problem(runtime, op, kernel, 2).calls) == count
    monkeypatch.setattr(MODULE, "HELD", 1)
    assert len(problem(runtime, op, kernel, 2).calls) == 1


def test_attention_reads_the_keys_and_values_of_its_context(runtime: hal.Runtime) -> None:
    op = AttentionDecode(heads=4, kv_heads=2, head_dim=16, page_size=4)
    short, long = (problem(runtime, op, "torch.attention_decode", 3, context=n, rotated=1).bytes for n in (10, 20))
    assert long - short == 3 * 10 * 2 * 2 * 16 * 2


def test_a_kernel_that_is_not_for_the_problem_says_why(runtime: hal.Runtime) -> None:
    with pytest.raises(hal.HalError, match=r"^needs vendor cuda or rocm; cpu has"):
        problem(runtime, SiluMul(columns=8), "triton.silu_mul", 2)


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_kernel_that_cannot_make_fp8_says_what_stands_in_its_own_way(op: Any, runtime: hal.Runtime) -> None:
    """Not that the op has no kernel: others make it, or make it and encode."""
    sizes = [c.op for c in op.cases() if isinstance(getattr(c.op, "out", None), Quantized)][:1]
    for size, name in [(size, name) for size in sizes for name in runtime.registry.names(op)]:
        try:
            problem(runtime, size, name, 3, context=5, rotated=1).calls[0]()
        except hal.HalError as error:
            assert str(error).startswith(("needs ", "makes ")), name  # noqa: PT017 - some can be had


@pytest.mark.parametrize("op", COLLECTIVES)
def test_of_one_rank_alone_no_collective_is_timed(op: Any, runtime: hal.Runtime) -> None:
    (kernel,) = runtime.registry.names(op)
    with pytest.raises(hal.HalError, match="joins ranks: of one rank alone there is nothing to time"):
        problem(runtime, op.cases()[0].op, kernel, 2)


def test_what_is_forced_for_a_part_still_holds() -> None:
    size = NormGateUp.cases()[0].op
    for forced, reason in (
        ("SiluMul=triton.silu_mul", "part act: SiluMul: triton.silu_mul is forced and cannot be had on cpu: needs "),
        ("SiluMul=torch.silu_mul", ""),
        ("NormGateUp=triton.norm_gate_up_one", ""),
    ):
        runtime = hal.Runtime(hal.load_device("cpu"), hal.Policy.of(force=[forced]))
        if not reason:
            assert problem(runtime, size, "composed.norm_gate_up", 2, rotated=1).calls
            continue
        with pytest.raises(hal.HalError) as caught:
            problem(runtime, size, "composed.norm_gate_up", 2, rotated=1)
        assert reason in str(caught.value)


def test_a_call_is_timed_by_what_more_rounds_add(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("hal.bench.timing.time.perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += 7e-6

    eager: Any = SimpleNamespace(can_capture=False)
    assert microseconds(eager, [call] * 5) == pytest.approx(7.0)


@pytest.mark.parametrize("took", [(6.0, 6.0), (9.0, 6.0)])
def test_three_rounds_no_longer_than_one_bound_the_time_from_above(took: tuple[float, float]) -> None:
    one, three = took
    assert _least(lambda rounds: one if rounds == 1 else three, 2) == three / 3 / 2


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
    assert answer["rotate"] == 1_000_000
    for name in ("torch.silu_mul", "other"):
        # the most copies that are made, and they do not move what was asked for
        assert rows[2, name]["copies"] == 64
        assert rows[2, name]["rotated"] == 64 * 2 * 48 * 3 * 2
    assert len({frozenset(row) for row in answer["results"]}) == 1
    assert rows[2, "triton.silu_mul"]["us"] is None
    assert rows[2, "triton.silu_mul"]["reason"].startswith("needs vendor cuda or rocm; ")
    assert rows[2, "other"]["us"] > 0


def test_the_table_says_what_goes_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "SiluMul", "--rows", "200", "--rotate", "1"]) == 0
    heads, row = capsys.readouterr().out.splitlines()[3:5]
    assert "copies  MB of all" in heads
    assert "  18      1.04 " in row


def test_what_fails_is_a_row_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hal_torch.code.small as small

    load, normal = small.silu_mul, MODULE._normal

    def raises(*_: Any) -> Any:
        raise RuntimeError("no\nluck")

    def broken(site: Any) -> Any:
        call = load(site)
        return lambda x: raises() if x.shape[0] == 2 else call(x)

    def full(shape: Any, *rest: Any) -> Any:
        if shape[0] == 3:
            raise torch.OutOfMemoryError("no room")
        return normal(shape, *rest)

    monkeypatch.setattr(small, "silu_mul", broken)
    monkeypatch.setattr(MODULE, "_normal", full)
    (tmp_path / "failing.py").write_text(
        "def stop():\n    raise KeyError('gone')\n"
        "def others(problem):\n"
        "    if problem.rows == 5:\n        return [stop]\n"
        "    if problem.rows == 6:\n        stop()\n"
        "    return {'bad': [stop], 'empty': []} if problem.rows == 7 else {'bad': [stop], 'good': problem.calls}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = results(capsys, "SiluMul", "RMSNorm", "--rows", "1,2,3,5,6,7", "--peers", "failing:others")
    rows = {(r["op"], r["rows"], r["kernel"]): r for r in answer["results"]}
    assert len({frozenset(row) for row in answer["results"]}) == 1
    for key, reason in (
        (("SiluMul", 2, "torch.silu_mul"), "RuntimeError: no luck"),
        (("SiluMul", 3, "torch.silu_mul"), "OutOfMemoryError: no room"),
        (("SiluMul", 1, "bad"), "KeyError: 'gone'"),
        (("SiluMul", 5, "failing:others"), "expected a dict from names to lists of calls, one for each copy; got list"),
        (("SiluMul", 6, "failing:others"), "KeyError: 'gone'"),
        (("SiluMul", 7, "failing:others"), "one for each copy; got 'empty': []"),
    ):
        assert rows[key]["us"] is rows[key]["copies"] is None
        assert rows[key]["reason"].endswith(reason)
    timed = {key for key, row in rows.items() if row["us"] is not None}
    assert timed >= {("SiluMul", n, "torch.silu_mul") for n in (1, 5, 6, 7)}
    assert timed >= {("SiluMul", 1, "good"), ("RMSNorm", 2, "torch.rms_norm"), ("RMSNorm", 2, "good")}


def test_a_force_that_cannot_be_met_is_the_reason_of_its_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAL_FORCE", "SiluMul=triton.silu_mul")
    answer = results(capsys, "SiluMul", "--rows", "1")
    assert {r["kernel"]: r["us"] is not None for r in answer["results"]}["torch.silu_mul"]
    assert not any(r["chosen"] for r in answer["results"])


def test_problems_come_from_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    answer = results(capsys, "SiluMul", "--model", "qwen3.5-0.8b", "--tp", "2", "--rows", "1")
    (found,) = {json.dumps(r["problem"]) for r in answer["results"]}
    assert json.loads(found)["columns"] == 3584 // 2


class Unserved(SiluMul):
    """An op that no kernel serves."""


def test_what_cannot_be_timed_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setitem(OPS, "Unserved", Unserved)
    for words, said in (
        (["MoE", "--model", "qwen3.5-0.8b"], "qwen3.5-0.8b has no MoE on"),
        (["SiluMul", "--kernel", "torch.none"], "SiluMul: no kernel torch.none; it has "),
        (["SiluMul", "Unserved"], "Unserved: no kernel serves it"),
        (["SiluMul", "--tp", "2"], "--tp 2: only a model's problems are divided over ranks; name one with --model"),
        (["SiluMul", "--peers", "nowhere:f"], "--peers nowhere:f: ModuleNotFoundError: No module named 'nowhere'"),
        (["SiluMul", "--peers", "json:nothing"], "--peers json:nothing: AttributeError: module 'json' has no"),
        (["SiluMul", "--peers", "json:__name__"], "--peers json:__name__: expected a function, got str"),
        (["SiluMul", "--peers", "json"], "--peers is MODULE:FUNCTION, got 'json'"),
        (["SiluMul", "--peers", ":f"], "--peers is MODULE:FUNCTION, got ':f'"),
        (["SiluMul", "--out", "/no/folder/x"], "--out /no/folder/x: there is no folder /no/folder"),
        (["SiluMul", "--plot", "."], "--plot .: expected a file, got a folder"),
    ):
        assert main(["bench", *words, "--rows", "1", "--rotate", "1"]) == 1
        heard = capsys.readouterr()
        assert said in heard.err
        assert heard.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--context", "-1"], "argument --context: expected a whole number of 0 or more, got '-1'"),
        (["--tp", "two"], "argument --tp: expected a whole number of 1 or more, got 'two'"),
        (["--rotate", "0"], "argument --rotate: expected a whole number of 1 or more, got '0'"),
        (["--rows", "1,,2"], "argument --rows: expected whole numbers of 1 or more with commas between, got '1,,2'"),
        (["--rows", "0"], "argument --rows: expected whole numbers of 1 or more with commas between, got '0'"),
        *(
            (([f"--{name}", ""]), f"argument --{name}: expected a name, got ''")
            for name in ("model", "peers", "kernel")
        ),
    ],
)
def test_an_argument_that_is_none_is_a_wrong_call(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "SiluMul", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("op", [AllReduce, AllGather, AddRMSNorm])
def test_over_ranks_only_a_rank_s_own_work_is_timed(op: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = [op.title(), "--model", "qwen3.5-0.8b", "--tp", "2", "--rows", "1", "--rotate", "1", "--json"]
    assert main(["bench", *words]) == int(op in COLLECTIVES)
    for row in json.loads(capsys.readouterr().out)["results"]:
        assert row["problem"]["world"] == 1
        if op in COLLECTIVES:
            assert row["reason"] == "joins ranks: of one rank alone there is nothing to time"


def test_nothing_is_timed_before_it_is_known_where_it_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hal.bench.ceiling", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for words in (["--out", str(tmp_path / "no" / "x")], ["--plot", str(tmp_path / "x.png")]):
        assert main(["bench", "SiluMul", *words]) == 1
    assert main(["bench", "e2e", "--out", str(tmp_path / "no" / "x")]) == 1
    assert "there is no folder" in capsys.readouterr().err


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
    assert all(isinstance(r["ms"], float) for r in answer["rows"])
    assert main(["bench", "e2e", "--outputs", "1"]) == 1
    assert "--outputs is 2 or more, got 1" in capsys.readouterr().err
