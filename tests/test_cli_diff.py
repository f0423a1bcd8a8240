"""``hal diff``: facts and choices that differ between two devices, and the exit status of ``diff``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from facts import device, here

from hal.cli import main
from hal.device import FACTS, Device, Fact

MODEL = ("--model", "qwen3.5-0.8b")
SIDE = {"op", "layouts", "pieces", "refused", "fell_back", "not_here"}


def told(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 1) -> Any:
    assert main(["diff", *argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def dumped(folder: Path, name: str, found: Device) -> str:
    file = folder / name
    file.write_text(json.dumps(found.to_json()))
    return str(file)


def test_a_device_and_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = told(capsys, "h200", "h200", *MODEL, status=0)
    assert (data["facts"], data["lines"]) == ([], [])
    assert main(["diff", "h200", "h200", *MODEL]) == 0
    assert capsys.readouterr().out.endswith("nothing differs\n")
    # nothing serves it on either
    monkeypatch.setenv("HAL_DENY", "torch.sample")
    whole = told(capsys, "h200", "h200", *MODEL, "--all", status=0)
    assert {fact["fact"] for fact in whole["facts"]} == FACTS.keys()
    assert all(entry["same"] for entry in (*whole["facts"], *whole["lines"]))
    (sample,) = [line for line in whole["lines"] if line["op"] == "Sample"]
    assert "denied by the policy" in sample["a"]["refused"]
    assert [line["op"] for line in whole["lines"] if line["a"]["refused"]] == ["Sample"]


def test_two_vendors(capsys: pytest.CaptureFixture[str]) -> None:
    data = told(capsys, "h200", "mi300x", *MODEL)
    assert (data["schema"], [d["device"] for d in data["devices"]]) == ("hal.diff/1", ["h200", "mi300x"])
    facts = {fact["fact"]: fact for fact in data["facts"]}
    assert facts["vendor"]["a"] == ["cuda", "declared", "NVIDIA"]
    assert facts["wave_size"]["b"][0] == 64
    assert "python" not in facts
    assert all(line.keys() == {"model", "site", "sites", "op", "same", "a", "b"} for line in data["lines"])
    assert all(line[side].keys() >= SIDE for line in data["lines"] for side in "ab")
    lines = {line["op"]: line for line in data["lines"]}
    decode = lines["GatedDeltaDecode"]
    assert len(decode["sites"]) == 18
    for side, device_ in (("a", "h200"), ("b", "mi300x")):
        explained = ("explain", "GatedDeltaDecode", *MODEL, "--device", device_, "--json")
        assert main(explained) == 0
        own = json.loads(capsys.readouterr().out)
        assert decode[side]["pieces"] == own["pieces"]
        assert decode[side]["layouts"] == own["layouts"]
    # the other's kernels, with the reason here; those of parts too
    reasons = {lost["kernel"]: lost["reason"] for lost in decode["b"]["not_here"]}
    assert "needs vendor cuda; mi300x has 'rocm'" in reasons["cuda.decode_cluster"]
    assert ("norm", "rocm.add_rms_norm") in [(n["part"], n["kernel"]) for n in lines["InProj"]["a"]["not_here"]]


def test_settings_alone_are_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = told(capsys, "h200", dumped(tmp_path, "b.json", device("h200", pdl=False)), *MODEL)
    assert [fact["fact"] for fact in data["facts"]] == ["pdl"]
    (embed,) = [line for line in data["lines"] if line["op"] == "Embed"]
    a, b = (embed[side]["pieces"][0] for side in "ab")
    assert a["chosen"] == b["chosen"]
    assert (a["settings"]["PDL"], b["settings"]["PDL"]) == (True, False)
    # equal labels: told apart by what was asked for
    assert main(["diff", "h200", str(tmp_path / "b.json"), *MODEL]) == 1
    assert f"\n  on {tmp_path / 'b.json'}: weight packed\n" in capsys.readouterr().out


def test_a_source_is_no_difference_but_a_lost_fact_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arch = device("h200").value("arch")
    files = [
        dumped(tmp_path, f"{name}.json", here("h200", l2_bytes=fact, arch=Fact(arch, source, "")))
        for name, fact, source in (
            ("a", Fact(None, "declared", "no document"), "declared"),
            ("b", Fact(None, "failed", "no permission"), "probed"),
        )
    ]
    data = told(capsys, *files, *MODEL)
    assert [fact["fact"] for fact in data["facts"]] == ["l2_bytes"]
    assert data["facts"][0]["b"] == [None, "failed", "no permission"]


def test_one_side_lacks_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = dumped(tmp_path, "bare.json", device("h200").with_stack("bare"))
    data = told(capsys, "h200", bare, *MODEL)
    (sample,) = [line for line in data["lines"] if line["op"] == "Sample"]
    assert sample["a"]["pieces"]
    assert "no kernel for Sample" in sample["b"]["refused"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("h200", "h20"), "did you mean 'h200'?"),
        (("{tmp}/none.json", "h200"), "none.json: cannot be read as a hal.device/1 file"),
        (("h200", "h100", "--model", "nope"), "unknown model"),
        (("h200", "h100", "--tp", "3"), "over 3 ranks leaves"),
        (("h200",), "usage: hal diff"),
    ],
)
def test_trouble_is_2(words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *(word.format(tmp=tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
