"""``hal matrix``: cells that agree with ``hal explain``, the evidence in them, and a page that stands by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from facts import device, fake, runtime

from hal.choice import Choice
from hal.cli import main
from hal.cli.look import COLOURS, KINDS
from hal.cli.page import page
from hal.cli.seen import COMMITTED, SHOWN, Seen, of_piece, weakest
from hal.evidence import KINDS as RECORDED
from hal.evidence import Evidence, Row, write
from hal.ops import OPS, GatedMLP, SiluMul

MODEL = "qwen3.5-0.8b"
DEVICES = ("h200", "mi300x", "cpu")
RAN = Evidence(
    "NVIDIA H200", "sm_90", "2026-01-31", stack={"torch": "2.11.0"}, note="one process",
    rows=(Row("Embed", "triton.embed", "ran", 7), Row("Copy", "torch.copy", "failed", 2, "off by 3 <b>")),
)  # fmt: skip
VOID = {"meta", "br", "wbr"}


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(RAN, tmp_path / "ran.json")
    return tmp_path / "ran.json"


def cell(data: dict[str, Any], op: str, on: str) -> dict[str, Any]:
    (row,) = [row for row in data["ops"] if row["op"] == op]
    (found,) = [found for found in row["cells"] if found["device"] == on]
    return found  # type: ignore[no-any-return]


def test_a_cell_says_what_explain_says(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = told(capsys, "matrix", "--device", *DEVICES, "--model", MODEL, "--evidence", str(file))
    assert (data["schema"], data["models"], data["world"]) == ("hal.matrix/1", [MODEL], 1)
    assert [row["op"] for row in data["ops"]] == list(OPS)
    assert all([c["device"] for c in row["cells"]] == list(DEVICES) for row in data["ops"])
    for op in ("GatedDeltaDecode", "SiluMul"):
        own = told(capsys, "explain", op, "--model", MODEL, "--device", "mi300x")
        (row,) = [row for row in data["ops"] if row["op"] == op]
        assert row["problem"] == own["problem"]
        for key in ("rows", "chosen", "settings", "why"):
            assert [p[key] for p in cell(data, op, "mi300x")["pieces"]] == [p[key] for p in own["pieces"]]
    # no model has it
    (copy,) = [row for row in data["ops"] if row["op"] == "Copy"]
    assert "its first case" in copy["model"]
    # it is one launch on this device, and a part on others
    assert "runs torch.prefill" in cell(data, "CausalConv", "cpu")["note"]
    ran = cell(data, "Embed", "h200")["evidence"]
    assert (ran["kind"], ran["date"], ran["on"], ran["cases"]) == ("ran", "2026-01-31", "NVIDIA H200", 7)
    assert cell(data, "Embed", "mi300x")["evidence"]["kind"] == "resolved"
    failed = cell(data, "Copy", "h200")["evidence"]
    assert (failed["kind"], failed["why"]) == ("failed", "off by 3 <b>")


def test_other_models_and_ranks_are_other_problems(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("matrix", "--device", "cpu", "--model", "qwen3.5-4b", "qwen3.5-35b-a3b", "--tp", "2")
    rows = {row["op"]: row for row in told(capsys, *words)["ops"]}
    assert rows["MoE"]["model"] == "qwen3.5-35b-a3b"
    assert (rows["Linear"]["model"], rows["Linear"]["problem"]["columns"]) == ("qwen3.5-4b", 32 * 128 // 2)


def test_refused_everywhere_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HAL_DENY", "torch.sample")
    to = tmp_path / "page.html"
    data = told(capsys, "matrix", "--device", "mi300x", "--model", MODEL, "--html", str(to))
    found = cell(data, "Sample", "mi300x")
    assert found["pieces"] == []
    assert found["evidence"] is None
    assert "torch.sample (rows 1..): denied by the policy" in found["refused"]
    assert "denied by the policy" in to.read_text()
    # the others were decided all the same
    assert cell(data, "Linear", "mi300x")["pieces"]
    assert main(["matrix", "--device", "mi300x", "--model", MODEL]) == 0
    assert re.search(r"\nSample +\S+ +mi300x +refused +sample: no kernel for Sample", capsys.readouterr().out)


def test_without_the_repository_s_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hal.cli.seen.COMMITTED", tmp_path / "not there")
    to = tmp_path / "page.html"
    assert main(["matrix", "--device", "h200", "--model", MODEL, "--html", str(to)]) == 0
    assert capsys.readouterr().out.endswith("no evidence files: what is shown is resolved only\n")
    assert "no evidence files: what is shown is resolved only" in to.read_text()
    data = told(capsys, "matrix", "--device", "h200", "--model", MODEL)
    assert {row["cells"][0]["evidence"]["kind"] for row in data["ops"]} == {"resolved"}


def test_what_is_committed_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    data = told(capsys, "matrix", "--device", "h200", "mi300x", "--model", MODEL)
    files = [file["file"] for file in data["evidence"]]
    assert files == sorted(f"ci/evidence/{file.name}" for file in COMMITTED.glob("*.json"))
    ran = cell(data, "Linear", "h200")["evidence"]
    assert (ran["kind"], ran["on"]) == ("ran", "NVIDIA H200")
    assert cell(data, "Embed", "mi300x")["evidence"]["kind"] in ("compiled", "interpreted")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "h20"), "unknown device profile 'h20'; did you mean 'h200'?"),
        (("--device", "h200", "{h200}"), "two devices are called 'h200'"),
        (("--evidence", "{tmp}/none.json"), "none.json: cannot be read as a hal.evidence/1 file"),
        (("--evidence", "{h200}"), "schema is hal.evidence/1, got 'hal.device/1'"),
        (("--model", "qwen3.5-5b"), "did you mean 'qwen3.5-"),
        (("--html", "{tmp}/none/page.html"), "there is no folder"),
        (("--html", "{tmp}"), "expected a file, got a folder"),
    ],
)
def test_a_wrong_demand_writes_nothing(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = tmp_path / "same.json"
    same.write_text(json.dumps(device("h200").to_json()))
    page_ = tmp_path / "page.html"
    words = tuple(word.format(tmp=tmp_path, h200=same) for word in words)
    assert main(["matrix", "--html", str(page_), *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert not page_.exists()


# evidence


def files(*rows: tuple[str, Row], **changed: Any) -> dict[str, Evidence]:
    """A file for each row, made on that day on an H200."""
    made = {"device": "NVIDIA H200", "arch": "sm_90"} | changed
    return {f"{i}": Evidence(date=day, rows=(row,), **made) for i, (day, row) in enumerate(rows)}


def best(found: dict[str, Evidence], on: str) -> Seen:
    op = SiluMul(columns=8)
    (choice,) = runtime(device(on), load=False).resolver.resolve((op,))
    (seen,) = of_piece(choice, choice.pieces[0], device(on), found)
    assert seen.kernel == "torch.silu_mul"
    return seen


def silu(kind: str, cases: int = 1, on: str = "") -> Row:
    return Row("SiluMul", "torch.silu_mul", kind, cases, "wrong" if kind == "failed" else "", on)


def test_the_strongest_kind_then_the_newest() -> None:
    found = files(
        ("2026-01-03", silu("compiled")), ("2026-01-01", silu("ran", 1)), ("2026-01-02", silu("ran", 2)),
        ("2026-01-04", silu("emulated")), ("2026-01-05", Row("Linear", "torch.silu_mul", "ran", 3)),
    )  # fmt: skip
    assert (best(found, "h200").kind, best(found, "h200").date, best(found, "h200").cases) == ("ran", "2026-01-02", 2)


def test_a_failure_stands_unless_something_newer_is_seen() -> None:
    ran, failed = ("2026-01-02", silu("ran")), silu("failed")
    assert best(files(ran, ("2026-01-01", failed)), "h200").kind == "ran"
    assert best(files(ran, ("2026-01-02", failed)), "h200").kind == "failed"
    assert best(files(ran, ("2026-01-03", failed)), "h200").why == "wrong"


def test_evidence_is_of_an_architecture_unless_it_was_interpreted() -> None:
    for kind in ("ran", "compiled"):
        assert best(files(("2026-01-01", silu(kind))), "h100").kind == kind
        assert best(files(("2026-01-01", silu(kind))), "mi300x").kind == "resolved"
    # a kernel of the CPU's own, chosen by the facts of a GPU, ran on the CPU
    assert best(files(("2026-01-01", silu("ran", on="h200")), arch="cpu", device="here"), "h200").kind == "resolved"
    assert best(files(("2026-01-01", silu("ran", on="h200")), arch="cpu", device="here"), "cpu").on == "here"
    # a profile stood for the device
    assert best(files(("2026-01-01", silu("emulated", on="mi308x")), arch="cpu"), "mi300x").kind == "emulated"
    assert best(files(("2026-01-01", silu("emulated", on="mi355x")), arch="cpu"), "mi300x").kind == "resolved"
    assert best(files(("2026-01-01", silu("interpreted", on="h200")), arch="cpu"), "mi300x").on == "h200"


def mlp(*kernels: Any) -> Choice:
    op = GatedMLP(hidden=32, intermediate=48)
    (choice,) = runtime("cpu", *kernels, load=False).resolver.resolve((op,))
    return choice


def test_a_composed_kernel_is_seen_as_its_least_part() -> None:
    choice, here = mlp(), device("cpu")
    (piece,) = choice.pieces
    assert piece.kernel.name == "composed.gated_mlp"
    unseen = list(of_piece(choice, piece, here, {}))
    assert unseen[0].kernel == "composed.gated_mlp"
    rows = [Row(seen.op, seen.kernel, "ran", 1) for seen in unseen]
    compiled = [Row(rows[0].op, rows[0].kernel, "compiled", 1), *rows[1:]]
    for parts, kind in ((rows, "ran"), (compiled, "compiled"), (rows[1:], "resolved")):
        found = {"a": Evidence("cpu", "cpu", "2026-01-01", rows=tuple(parts))}
        assert weakest(of_piece(choice, piece, here, found)).kind == kind
    # that the whole ran is not enough where a part of today was never seen
    whole = Evidence("cpu", "cpu", "2026-01-01", rows=(Row("GatedMLP", piece.kernel.name, "ran", 1),))
    assert weakest(of_piece(choice, piece, here, {"a": whole})).kind == "resolved"


def test_a_kernel_that_is_not_composed_is_never_seen_by_its_parts() -> None:
    parts = {"parts": lambda self, op: {"act": _part(op)}, "tier": "fused"}
    choice = mlp(fake(GatedMLP, "mine.mlp", **parts))
    (piece,) = choice.pieces
    assert piece.kernel.name == "mine.mlp"
    found = {"a": Evidence("cpu", "cpu", "2026-01-01", rows=(silu("ran"),))}
    seen = list(of_piece(choice, piece, device("cpu"), found))
    assert [(s.part, s.kernel, s.kind) for s in seen] == [
        ("", "mine.mlp", "resolved"),
        ("act", "torch.silu_mul", "ran"),
    ]
    assert weakest(seen).kernel == "mine.mlp"


def _part(op: GatedMLP) -> Any:
    from hal.kernel import Part

    return Part(SiluMul(columns=op.intermediate, dtype=op.dtype))


# the page


class Parsed(HTMLParser):
    """Tags, attributes and text; what is opened is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and {"td", "th"} & set(self.open):
            self.cells[-1] += data


@pytest.fixture
def data(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("HAL_DENY", "torch.sample")
    return told(  # type: ignore[no-any-return]
        capsys, "matrix", "--device", "h200", "mi300x", "--model", "tiny-dense", "--evidence", str(file)
    )


def changed(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    """Every text in it changed, but for kinds of evidence."""
    if isinstance(value, dict):
        return {name: changed(inner, change, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [changed(inner, change, key) for inner in value]
    return change(value) if isinstance(value, str) and value and key != "kind" else value


def test_the_page_has_every_op_and_device_and_loads_nothing(data: dict[str, Any]) -> None:
    text = page(data)
    parsed = Parsed(text)
    assert all(any(c.startswith(op) for c in parsed.cells) for op in OPS)
    assert all(any(c.startswith(name) for c in parsed.cells) for name in ("h200cuda sm_90", "mi300xrocm gfx942"))
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not {key for _, attrs in parsed.tags for key in attrs} & {"src", "href", "srcset", "action", "onclick"}
    assert not re.search(r"url\(|@import|https?:", text)
    # reasons on hover, and for keys and touch
    embed = next(i for i, c in enumerate(parsed.cells) if c.startswith("triton.embed"))
    assert "ran 2026-01-31" in parsed.cells[embed]
    assert "ranked first" in parsed.cells[embed]
    hovers = [attrs["title"] or "" for tag, attrs in parsed.tags if tag == "summary"]
    assert len(hovers) == len(OPS) * 3
    assert all(hovers)
    assert any("denied by the policy" in hover for hover in hovers)
    assert all(f">{kind}</span>" in text for kind in KINDS)
    assert "one process" in text


def test_names_are_no_markup(data: dict[str, Any]) -> None:
    hostile = '</td></style><script a="\'">&amp;'
    data["broken"] = [{"backend": "odd", "error": "ImportError"}]
    before, after = Parsed(page(data)), Parsed(page(changed(data, lambda text: text + hostile)))
    assert [tag for tag, _ in after.tags] == [tag for tag, _ in before.tags]
    assert [sorted(attrs) for _, attrs in after.tags] == [sorted(attrs) for _, attrs in before.tags]
    assert sum(hostile in c for c in after.cells) == len(after.cells) - 1 - 2 - 2  # corner, group heads and their rest


def test_every_kind_has_a_word_and_a_colour() -> None:
    assert set(KINDS) == set(RECORDED) == {*SHOWN, "refused"}
    assert set(KINDS) <= set(COLOURS)


def colours() -> Iterator[tuple[str, str, str]]:
    for name, schemes in COLOURS.items():
        for text, ground in schemes:
            yield name, text, ground
    # the mark of a closed cell
    for (mark, _), (_, ground) in zip(COLOURS["quiet-head"], COLOURS["page"], strict=True):
        yield "mark", mark, ground


@pytest.mark.parametrize(("name", "text", "ground"), list(colours()))
def test_contrast(name: str, text: str, ground: str) -> None:
    low, high = sorted(_luminance(colour) for colour in (text, ground))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def _luminance(colour: str) -> float:
    """WCAG's relative luminance of ``#rrggbb``."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
