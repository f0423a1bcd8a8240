"""Probing never raises, never hides, and imports nothing to learn whether it is there."""

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
from facts import package

import hal
from hal.backend import Backend, Broken, discover
from hal.device import FACTS, Fact
from hal.probing import ask_child, attempt, built_with, library

CPU = Backend("torch", probe="hal_torch.probe:probe")
OURS = [Backend(name, probe=f"hal_{name}.probe:probe") for name in ("cuda", "rocm")] + [CPU]
RAISED = [
    KeyError("gfx1201"),
    RuntimeError("two\nlines"),
    OSError("x.so"),
    ImportError(),
    SystemExit(1),
    AssertionError(),
]


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def backend(monkeypatch: pytest.MonkeyPatch, name: str, answer: object) -> Backend:
    """A backend whose probe gives the answer, or raises it."""

    def probe() -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    module = ModuleType(f"fake_{name}")
    module.__dict__["probe"] = probe
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Backend(name, probe=f"fake_{name}:probe")


def distribution(folder: Path, name: str, lines: str) -> None:
    info = folder / f"{name}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n{lines}\n")


def test_this_machine_has_a_cpu() -> None:
    here = hal.probe([CPU])
    assert (here.label, here.stack, here["vendor"]) == ("here", "installed", Fact("cpu", "probed", ""))
    assert here.value("torch") is not None
    assert here.value("python") == ".".join(map(str, sys.version_info[:3]))


def test_a_probe_is_told_as_json_and_repeats_itself() -> None:
    here = hal.probe(OURS)
    assert hal.probe(OURS) == here
    assert json.loads(json.dumps(here.to_json(), allow_nan=False)) == here.to_json()


def test_no_backend_at_all_is_a_device_of_which_nothing_is_known() -> None:
    here = hal.probe([])
    assert here["vendor"] == Fact(None, "probed", "")
    assert here["arch"].why == "no probe answers it"


@pytest.mark.parametrize("error", [*RAISED, MuteError()], ids=lambda e: type(e).__name__)
def test_whatever_a_probe_raises_becomes_text_and_the_others_go_on(error, monkeypatch) -> None:
    vendor = hal.probe([backend(monkeypatch, "npu", error), CPU])["vendor"]
    assert (vendor.value, vendor.source) == ("cpu", "failed")
    assert vendor.why.startswith(f"npu: its probe failed: {type(error).__name__}")
    assert "\n" not in vendor.why


def test_a_probe_that_is_not_there_is_reported() -> None:
    vendor = hal.probe([Backend("npu", probe="no_such_module:probe"), CPU])["vendor"]
    assert vendor == Fact(
        "cpu", "failed", "npu: its probe failed: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_an_interrupt_is_no_answer(monkeypatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        hal.probe([backend(monkeypatch, "npu", KeyboardInterrupt())])


NPU = {"vendor": Fact("npu", "probed", "by a fake")}


@pytest.mark.parametrize(
    ("answer", "name", "says"),
    [
        (NPU | {"wave": Fact(64, "probed")}, "vendor", "npu: answers an unknown fact 'wave'"),
        (NPU | {"wave_size": Fact(True, "probed")}, "wave_size", "npu answers True, not int"),
        (NPU | {"wave_size": 64}, "wave_size", "npu answers 64, which is no Fact"),
        (NPU | {"arch": Fact("x", "guessed")}, "arch", "whose source or text is none"),  # type: ignore[arg-type]
        (NPU | {"arch": Fact("x", "probed", None)}, "arch", "whose source or text is none"),  # type: ignore[arg-type]
        ({"vendor": Fact(["npu"], "probed")}, "vendor", "npu: npu answers ['npu'], not str"),  # type: ignore[arg-type]
        (None, "vendor", "npu: its probe failed: TypeError: a probe answers facts by name, got None"),
        (["vendor"], "vendor", "npu: its probe failed: TypeError"),
        ({}, "vendor", "npu: its probe names no vendor"),
    ],
)
def test_an_answer_that_does_not_fit_is_reported(answer, name: str, says: str, monkeypatch) -> None:
    here = hal.probe([backend(monkeypatch, "npu", answer), CPU])
    assert says in here[name].why
    assert list(here) == list(FACTS)


def test_the_first_accelerator_comes_before_the_cpu_and_says_who_else_is_here(monkeypatch) -> None:
    first = backend(monkeypatch, "a", NPU | {"wave_size": Fact(16, "probed"), "driver": Fact("1", "probed")})
    other = backend(monkeypatch, "b", {"vendor": Fact("gpu", "probed"), "driver": Fact("2", "probed")})
    plain = backend(monkeypatch, "c", {"vendor": Fact("cpu", "probed"), "driver": Fact("0", "probed")})
    here = hal.probe([plain, first, other])
    assert here["vendor"] == Fact("npu", "probed", "by a fake; b: a device is here, but a comes first")
    assert (here.value("wave_size"), here.value("driver"), here.value("arch")) == (16, "1", None)


def test_a_broken_backend_may_have_hidden_an_accelerator(monkeypatch) -> None:
    broken = [Broken("cuda", "ImportError: x")]
    assert hal.probe([CPU], broken)["vendor"] == Fact("cpu", "failed", "cuda: ImportError: x")
    found = hal.probe([backend(monkeypatch, "npu", NPU)], broken)["vendor"]
    assert found == Fact("npu", "probed", "by a fake; cuda: ImportError: x")


@pytest.mark.parametrize("error", ["ImportError('x')", "SystemExit(1)", "KeyError('gfx1201')"])
def test_a_backend_that_fails_at_import_is_a_row(error: str, monkeypatch, tmp_path) -> None:
    package(monkeypatch, tmp_path / "fails_at_import", __init__=f"raise {error}")
    entries = [("bad", "fails_at_import:backend"), ("odd", "hal:__version__"), ("cuda", "hal_cuda:backend")]
    found, broken = discover([EntryPoint(name, value, "hal.backends") for name, value in entries])
    assert [b.name for b in found] == ["cuda"]
    assert [b.name for b in broken] == ["bad", "odd"]
    assert broken[0].error.startswith(error.partition("(")[0])


def test_a_library_is_known_by_its_metadata(monkeypatch, tmp_path) -> None:
    package(monkeypatch, tmp_path / "aiter", __init__="raise KeyError")
    distribution(tmp_path, "amd_aiter", "Version: 0.1.20")
    assert library("amd-aiter", "aiter", module="aiter") == Fact("0.1.20", "probed", "distribution amd-aiter")


def test_metadata_without_a_version_is_broken(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    distribution(tmp_path, "fla_core", "")
    assert library("fla-core").source == "failed"


def test_a_folder_of_that_name_is_no_library(monkeypatch, tmp_path) -> None:
    package(monkeypatch, tmp_path / "no_library_is_called_so", notes="")
    assert library("absent", module="no_library_is_called_so") == Fact(None, "probed", "no distribution absent")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("__version__ = '2.12'\nhip: str = '7.1'", Fact("7.1", "probed", "torch/version.py")),
        ("__version__ = '2.12'\nhip = None", Fact(None, "probed", "torch 2.12 is built without hip")),
        ("hip = ", Fact(None, "failed", "torch/version.py: SyntaxError: invalid syntax (<unknown>, line 1)")),
    ],
)
def test_torchs_build_is_read_and_not_imported(text: str, fact: Fact, monkeypatch, tmp_path) -> None:
    package(monkeypatch, tmp_path / "torch", __init__="raise OSError", version=text)
    assert built_with("hip") == fact


TELL = "from hal.probing import Fact, tell\ntell({'vendor': Fact('npu', 'probed', 'x')})\n"
NOISE = "import os\nos.write(1, b'\\xff no newline')\n"


@pytest.mark.parametrize("text", [TELL, NOISE + TELL, TELL + NOISE, "print('{}')\n" + TELL + "print('bye')"])
def test_a_child_is_heard_through_noise(text: str, monkeypatch, tmp_path) -> None:
    package(monkeypatch, tmp_path / "fake_child", __init__="", ask=text)
    assert ask_child("fake_child.ask") == {"vendor": Fact("npu", "probed", "x")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise KeyError('gfx1201')", "ended with 1: KeyError: 'gfx1201'"),
        ("import os; os.kill(os.getpid(), 9)", "ended with -9: nothing said"),
        (TELL + "raise SystemExit(3)", "ended with 3: nothing said"),
        (NOISE, "printed no facts"),
    ],
)
def test_a_child_that_dies_or_says_nothing_is_an_error_with_its_last_words(text, says, monkeypatch, tmp_path) -> None:
    package(monkeypatch, tmp_path / "fake_child", __init__="", ask=text)
    facts, error = attempt(lambda: ask_child("fake_child.ask"))
    assert facts is None
    assert error == f"RuntimeError: python -m fake_child.ask {says}"
