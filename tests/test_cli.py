"""The command line: JSON shapes, exit statuses, what it says where something cannot be had."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hal.backend import Broken
from hal.cli import main
from hal.device import load_device

MODEL = "qwen3.5-0.8b"
CANDIDATE = {"kernel", "rows", "status", "kind", "reason"}
PIECE = {"rows", "chosen", "settings", "why", "parts"}


@pytest.fixture(autouse=True)
def _default_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HAL_")]:
        monkeypatch.delenv(name)


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a call says that cannot be met: one status, nothing on standard output."""
    assert main(argv) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("hal: ")
    return said.err


def child(*argv: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))"
    code = f"{block}; from hal.cli import main; sys.exit(main({argv!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_lists_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in ("dump", "ops", "explain", "plan", "matrix", "diff", "verify"))


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["explain"], ["plan", MODEL, "--tp", "0"]])
def test_a_wrong_call_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "usage: hal" in capsys.readouterr().err


def test_dump_is_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "dump", "--device", "h100") == load_device("h100").to_json()
    assert told(capsys, "dump", "--device", "h100", "--stack", "bare")["stack"] == "bare"
    assert main(["dump"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "composed  installed" in out


def test_a_dump_answers_as_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.json"
    file.write_text(json.dumps(told(capsys, "dump")))
    here = told(capsys, "explain", "Linear", "--model", MODEL)
    assert told(capsys, "explain", "Linear", "--model", MODEL, "--device", str(file)) == here


def test_ops(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["op"]: row for row in told(capsys, "ops")["ops"]}
    assert rows["InProj"]["coarse"]
    assert not rows["Copy"]["coarse"]
    one = told(capsys, "ops", "Linear")
    assert {"schema", "op", "coarse", "contract", "fields", "example", "kernels"} <= one.keys()
    (linear,) = [k for k in one["kernels"] if k["kernel"] == "torch.linear"]
    assert linear["code"] == "hal_torch.code.linear:linear"
    assert any(need.startswith("torch") for need in linear["needs"])
    assert "did you mean 'Linear'" in refused(capsys, "ops", "Liner")


def test_explain_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    data = told(capsys, "explain", "GatedDeltaDecode", "--device", "mi300x", "--model", MODEL)
    assert data["schema"] == "hal.explain/1"
    assert (data["op"], data["device"], data["model"]) == ("GatedDeltaDecode", "mi300x", MODEL)
    assert data["group"].keys() == {"prefill", "decode"}
    assert len(data["sites"]) == 18
    assert "*" in data["site"]
    assert all(piece.keys() >= PIECE for piece in data["pieces"])
    assert all(c.keys() == CANDIDATE for c in data["candidates"])
    assert all(c["reason"] for c in data["candidates"] if c["status"] != "chosen")


def test_parts_are_explained_inside_and_on_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    whole = told(capsys, "explain", "GatedMLP", "--model", MODEL, "--device", "cpu")
    parts = [(n, p["op"]) for piece in whole["pieces"] for n, p in piece["parts"].items()]
    assert parts
    name, op = parts[0]
    own = told(capsys, "explain", op, "--model", MODEL, "--device", "cpu")
    sites = [site for found in (own, *own.get("others", ())) for site in found["sites"]]
    assert any(site.endswith(f"mlp.{name}") for site in sites)


def test_rows_ask_about_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = told(capsys, "explain", "MoE", "--device", "cpu")["pieces"]
    assert len(pieces) > 1
    few = told(capsys, "explain", "MoE", "--device", "cpu", "--rows", "300")
    assert [piece["chosen"] for piece in few["pieces"]] == [pieces[-1]["chosen"]]
    reasons = {c["kernel"]: c["reason"] for c in few["candidates"]}
    assert reasons[pieces[0]["chosen"]] == f"takes rows 1..{pieces[0]['rows'][1]}, not 300"


def test_the_first_case_where_no_model_has_the_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert "first case" in told(capsys, "explain", "Copy", "--device", "cpu")["model"]


def test_set_changes_the_problem(capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = ("--set", "scheme=fp8_tensor", "--set", "x=float8_e4m3fn")
    data = told(capsys, "explain", "Linear", "--model", MODEL, "--device", "cpu", *fp8, "--set", "columns=512")
    assert data["problem"]["columns"] == 512
    assert data["problem"]["x"].startswith("float8_e4m3fn (static")
    assert data["pieces"][0]["chosen"] == "torch.linear_quantized"
    said = refused(capsys, "explain", "Linear", "--model", MODEL, "--set", "colums=3")
    assert "did you mean 'columns'" in said
    assert "columns is int" in refused(capsys, "explain", "Linear", "--model", MODEL, "--set", "columns=x")


def test_what_a_model_that_drafts_binds_besides(capsys: pytest.CaptureFixture[str]) -> None:
    plain, drafting = (told(capsys, "plan", MODEL, "--device", "h200", "--draft", n) for n in ("0", "3"))
    sites = {line["site"] for line in drafting["lines"]} - {line["site"] for line in plain["lines"]}
    assert {"layers.*.linear_attn.core.verify", "accept", "mtp.fc"} <= sites
    data = told(capsys, "explain", "GatedDeltaVerify", "--model", MODEL, "--device", "mi300x", "--draft", "7")
    assert data["problem"]["queries"] == 8
    reasons = {c["kernel"]: c["reason"] for c in data["candidates"]}
    assert reasons["triton.verify_split"].endswith("8 rows, which take several waves; mi300x has rocm")
    assert "expected 0 (none) to 7 tokens, got 8" in refused(capsys, "plan", MODEL, "--draft", "8")
    assert "has no GatedDeltaVerify" in refused(capsys, "explain", "GatedDeltaVerify", "--model", MODEL)


def test_a_site_is_chosen_by_glob(capsys: pytest.CaptureFixture[str]) -> None:
    data = told(capsys, "explain", "Linear", "--model", MODEL, "--site", "layers.3.*")
    assert data["sites"] == ["layers.3.self_attn.o_proj"]
    assert "layers.*.self_attn.o_proj" in refused(capsys, "explain", "Linear", "--site", "nowhere")


@pytest.mark.parametrize(
    ("name", "value"), [("HAL_FORCE", "Linear=torch.linear_quantized"), ("HAL_DENY", "torch.linear")]
)
def test_an_unmet_demand_says_every_reason(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    said = refused(capsys, "explain", "Linear", "--model", MODEL, "--device", "cpu")
    assert all(kernel in said for kernel in ("torch.linear", "torch.linear_quantized", "torch.linear_widened"))


def test_unknown_names_say_the_nearest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'h100'" in refused(capsys, "dump", "--device", "h10")
    assert f"did you mean '{MODEL}'" in refused(capsys, "plan", "qwen3.5-0.8")
    assert "did you mean 'fp8_channel'" in refused(capsys, "plan", MODEL, "--scheme", "fp8_chanel")
    monkeypatch.setenv("HAL_FORCE", "Linear=torch.liner")
    assert "did you mean 'torch.linear'" in refused(capsys, "explain", "Linear")


def test_plan_counts_bytes_and_splits_them(capsys: pytest.CaptureFixture[str]) -> None:
    whole = told(capsys, "plan", MODEL, "--device", "h100")
    assert whole["schema"] == "hal.plan/1"
    assert len({site for line in whole["lines"] for site in line["sites"]}) > 24
    half = told(capsys, "plan", MODEL, "--device", "h100", "--tp", "2")
    for key in ("parameter_bytes", "state_bytes_per_slot"):
        assert whole[key] / 2 <= half[key] < whole[key] * 0.51
    # 6 layers, keys and values, 2 heads of 256 in bfloat16
    assert whole["kv_bytes_per_token"] == 6 * 2 * 2 * 256 * 2


@pytest.mark.spoils
def test_verify_counts_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = told(capsys, "verify", "Copy")
    assert data["schema"] == "hal.verify/1"
    assert data["results"][0].keys() == {"op", "kernel", "passed", "failed", "refused"}
    assert data["failures"] == []
    monkeypatch.setattr("hal_torch.code.small.copy", lambda site: lambda x: x + 1)
    assert main(["verify", "Copy"]) == 1
    assert "failed: Copy on torch.copy" in capsys.readouterr().out


def test_without_torch_and_triton() -> None:
    device = ("--device", "h100")
    for argv in (("dump",), ("ops", "MoE"), ("explain", "InProj", *device), ("plan", MODEL, *device)):
        done = child(*argv, blocked=("torch", "triton"))
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
    done = child("verify", blocked=("torch",))
    assert done.returncode == 1
    assert "needs torch" in done.stderr


def test_a_verb_of_a_broken_family(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hal.family.families", lambda: ([], [Broken("odd", "ImportError: no libodd")]))
    assert "family odd: ImportError: no libodd" in refused(capsys, "generate")


def test_a_closed_pipe_is_quiet() -> None:
    command = [sys.executable, "-m", "hal", "ops"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout and running.stderr  # noqa: PT018
        running.stdout.close()
        assert running.stderr.read() == b""
