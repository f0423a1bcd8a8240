"""The command line where something is in the way: a device that lacks software, a lost backend, odd text."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hal_models.shipped import SHIPPED
from hal_models.text import Bytes, printable

from hal.backend import Broken, discover
from hal.cli import main
from hal.cli.changes import changed
from hal.errors import HalError
from hal.formats import SCHEMES, Tensor
from hal.ops import InProj, Linear, Projection

TINY = "tiny-dense"
BARE = ("--device", "h200", "--stack", "bare")


@pytest.fixture(autouse=True)
def _default_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HAL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def odd_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = discover()
    monkeypatch.setattr("hal.registry.discover", lambda: (found, [Broken("odd", "ImportError: no libodd")]))


def told(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    assert main([*argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 1
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize("op", ["InProj", "Linear", "GatedDeltaDecode"])
def test_explain_speaks_of_the_op_where_no_op_can_be_had(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "explain", op, *BARE)
    assert f"no kernel for {op}(" in said
    assert "Embed" not in said
    kernels = [row["kernel"] for row in told(capsys, "ops", op)["kernels"]]
    assert all(f"  {name} (rows " in said for name in kernels)


def test_explain_of_a_part_where_no_whole_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "explain", "SiluMul", *BARE, "--model", TINY)
    assert ".mlp." in said
    assert "no kernel for SiluMul(" in said


def test_explain_where_only_another_op_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("explain", "InProj", "--device", "cpu", "--model", TINY)
    whole = told(capsys, *asked)
    changed_whole = told(capsys, *asked, "--set", "eps=1e-5")
    monkeypatch.setenv("HAL_DENY", "torch.embed")
    alone = told(capsys, *asked)
    assert alone.pop("model").startswith(f"{TINY}, of which cpu cannot run everything: ")
    assert whole.pop("model") == TINY
    assert alone == whole
    changed_alone = told(capsys, *asked, "--set", "eps=1e-5")
    assert changed_alone["pieces"] == changed_whole["pieces"]
    assert changed_alone["problem"]["eps"] == 1e-5
    assert "hal: unknown site" in refused(capsys, *asked, "--site", "nowhere")


def test_plain_formats_follow_the_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    parts = (Projection("q", 8, "q"), Projection("k", 8, "k", SCHEMES["fp8_channel"]))
    op = changed(InProj(hidden=16, parts=parts), {"dtype": "float32"})
    assert isinstance(op, InProj)
    assert op.parts == parts
    kept = changed(Linear(columns=8, rows=8, scheme=SCHEMES["fp8_channel"]), {"dtype": "float32"})
    assert isinstance(kept, Linear)
    assert (kept.x, kept.weight) == (Tensor("float32"), SCHEMES["fp8_channel"].weight)
    for name in ("InProj", "Linear", "AttentionDecode", "GatedDeltaPrefill"):
        data = told(capsys, "explain", name, "--device", "cpu", "--model", TINY, "--set", "dtype=float32")
        assert data["problem"]["dtype"] == "float32"
        assert "bfloat16" not in json.dumps(data["problem"])


@pytest.mark.usefixtures("odd_is_broken")
def test_a_broken_backend_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"backend": "odd", "error": "ImportError: no libodd"}]
    assert told(capsys, "ops")["broken"] == rows
    assert told(capsys, "ops", "Copy")["broken"] == rows
    assert told(capsys, "verify", "Copy", status=1)["broken"] == rows
    for argv, status in ((["ops"], 0), (["ops", "Copy"], 0), (["verify", "Copy"], 1)):
        assert main(argv) == status
        assert "backend odd is broken: ImportError: no libodd" in capsys.readouterr().out
    assert "backend odd is broken" in refused(capsys, "verify", "Copy", "--kernel", "odd.copy")


def test_verify_says_what_it_did_not_verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # this kernel has a requirement that the processor cannot meet
    monkeypatch.setattr("hal.probing.probe", lambda *_: _cpu())
    data = told(capsys, "verify", "--kernel", "cuda.linear", status=1)
    assert data["unverified"] == [{"what": "cuda.linear", "why": "all refused"}]
    assert main(["verify", "Linear", "--kernel", "cuda.linear"]) == 1
    out = capsys.readouterr().out
    assert "refused: Linear on cuda.linear: " in out
    assert "needs vendor cuda" in out
    assert "nothing verified: Linear: all refused" in out
    monkeypatch.setattr("hal.registry.Registry.names", lambda self, op=None: [])
    assert told(capsys, "verify", "Copy", status=1)["unverified"] == [{"what": "Copy", "why": "no kernel"}]


def _cpu() -> Any:
    from hal.device import load_device

    return load_device("cpu")


class AcceleratorError(RuntimeError):
    pass


@pytest.mark.spoils
@pytest.mark.parametrize("error", [AcceleratorError("gone"), RuntimeError("illegal memory access"), ValueError("odd")])
def test_verify_stops_where_the_device_is_lost(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(site: Any) -> Any:
        def call(*args: Any) -> Any:
            raise error

        return call

    sticky = not isinstance(error, ValueError)
    monkeypatch.setattr("hal_torch.code.small.copy", broken)
    data = told(capsys, "verify", "Copy", "SiluMul", "--kernel", "torch.copy", status=1)
    assert (len(data["failures"]) == 1) is sticky
    assert ("context is lost" in data["stopped"]) is sticky
    assert bool(data["unverified"]) is not sticky
    assert main(["verify", "Copy"]) == 1
    assert ("the rest was not run" in capsys.readouterr().out) is sticky


def test_an_error_outside_of_a_case_stops_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: Any) -> Iterator[Any]:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("hal.conformance.verify_kernel", lost)
    data = told(capsys, "verify", status=1)
    assert len(data["failures"]) == 1
    assert data["stopped"]


def test_stops_and_their_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("generate", TINY, "--prompt", "12+30=")
    assert main([*asked, "--stop", "\\n"]) == 0
    assert capsys.readouterr().out == "42\n"
    assert "bad escape" in refused(capsys, *asked, "--stop", "\\x")
    assert "bad escape" in refused(capsys, *asked, "--stop", "\\")
    assert "'é' is 2" in refused(capsys, *asked, "--stop", "é")
    assert "'€' is 3" in refused(capsys, *asked, "--stop", "€")
    assert "cannot be written as bytes" in refused(capsys, *asked, "--stop", "\\ud800")


def test_prompts_of_any_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert Bytes().encode("é\udcff") == [0xC3, 0xA9, 0xFF]
    assert printable("\udcc3\udca9 \udcff") == "é \ufffd"
    with pytest.raises(HalError, match="character 1"):
        Bytes().encode("a\ud800")
    prompts = ("--prompt", "a\udcff", "--prompt", "b")
    assert main(["generate", TINY, *prompts, "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("a\ufffd")


def test_a_checkpoint_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "generate", "nosuch", "--prompt", "a")
    assert "no such folder" in said
    assert "tiny-dense, tiny-moe" in said
    assert "give the folder of its checkpoint" in refused(capsys, "generate", "qwen3.5-0.8b", "--prompt", "a")


def test_shipped_checkpoints_are_models_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    by_name = told(capsys, "plan", TINY, "--device", "cpu")
    by_folder = told(capsys, "plan", str(SHIPPED / "dense"), "--device", "cpu")
    assert by_name | {"model": ""} == by_folder | {"model": ""}
    assert "did you mean 'tiny-dense'" in refused(capsys, "plan", "tiny-dens")


def test_a_force_that_binds_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HAL_FORCE", "Linear@nowhere=torch.linear")
    said = refused(capsys, "plan", TINY, "--device", "cpu")
    assert "Linear@nowhere=torch.linear" in said
    assert "layers.0.linear_attn.out_proj" in said


def test_plan_names_the_ops_of_refused_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    data = told(capsys, "plan", TINY, "--device", "cpu")
    assert sum(data["refused_by_op"].values()) == data["refused"] > 0
    assert main(["plan", TINY, "--device", "cpu"]) == 0
    assert f"InProj {data['refused_by_op']['InProj']}" in capsys.readouterr().out


def test_accuracy_is_the_same_in_steps(capsys: pytest.CaptureFixture[str]) -> None:
    from hal_models.commands.loading import checkpoint, loaded
    from hal_models.scoring import scored
    from hal_models.tasks import lines

    data = told(capsys, "accuracy", TINY, "--lines", "120")
    whole = scored(loaded(checkpoint(TINY), None), lines(7, 120))
    assert (data["lines"], data["exact"], data["bytes"]) == (whole.lines, whole.exact, whole.bytes)
    assert data["nll_per_byte"] == pytest.approx(whole.nll_per_byte)


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", ">/dev/full"])
@pytest.mark.parametrize("verb", ["ops", "dump", "plan tiny-dense --json", "generate tiny-dense --prompt 1+1="])
def test_an_output_that_cannot_be_written(verb: str, closed: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m hal {verb} {closed}", shell=True, capture_output=True, text=True, check=False
    )
    full = closed.startswith(">/")
    assert done.returncode == int(full)
    assert done.stderr == ("hal: the output cannot be written: No space left on device\n" if full else "")
