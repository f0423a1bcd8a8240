"""Contracts: what is passed to aiter is what its recorded signatures take; a wheel that differs is drift."""

from __future__ import annotations

import ast
import json
import os
import zipfile
from pathlib import Path

import aiter_contracts
import fake_aiter
import hal_rocm
import pytest
from aiter_contracts import contracts, main, parameters

CODE = Path(hal_rocm.__file__).parent / "code"
FUNCTIONS = contracts()["functions"]
VERSION = fake_aiter.VERSION


def called() -> dict[str, list[ast.Call]]:
    """Calls of aiter's functions in the backend, by module:function."""
    found: dict[str, list[ast.Call]] = {}
    for file in CODE.glob("*.py"):
        tree = ast.parse(file.read_text())
        names = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "aiter"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                found.setdefault(names[node.func.id], []).append(node)
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Import) and n.names[0].name.startswith("aiter")]
    return found


def test_aiter_is_called_by_keyword_alone_with_names_that_are_recorded() -> None:
    calls = called()
    assert len(calls) >= 9
    for name, nodes in calls.items():
        for node in nodes:
            assert not node.args, f"{name} is called by position"
            assert {keyword.arg for keyword in node.keywords} == set(FUNCTIONS[name]["passes"])


def test_aiter_is_imported_inside_functions_only() -> None:
    for file in (*CODE.glob("*.py"), *CODE.parent.glob("*.py")):
        top = [n for n in ast.parse(file.read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))]
        assert not [n for n in top if "aiter" in ast.unparse(n)], file.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_passed_is_what_the_version_takes(name: str) -> None:
    takes = dict(FUNCTIONS[name]["versions"][VERSION])
    passes = FUNCTIONS[name]["passes"]
    assert set(passes) <= set(takes)
    assert {n for n, default in takes.items() if default is None} <= set(passes)
    assert all(meaning for meaning in passes.values())


def test_the_wheel_is_too_old_for_names_that_are_passed() -> None:
    old = "0.1.7.post2.dev18"
    lacking = {
        name
        for name, contract in FUNCTIONS.items()
        if not set(contract["passes"]) <= {n for n, _ in contract["versions"][old] or []}
    }
    assert lacking == {
        "aiter.ops.rmsnorm:rmsnorm",
        "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add",
        "aiter.dist.communication_op:tensor_model_parallel_fused_allreduce_rmsnorm",
        "aiter.ops.triton.attention.unified_attention:unified_attention",
    }
    # at the same place stands another name: why nothing is passed by position
    places = FUNCTIONS["aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add"]["versions"]
    assert [places[v][6][0] for v in (old, VERSION)] == ["use_model_sensitive_rmsnorm", "gemma_norm"]


def test_parameters_are_read_from_sources() -> None:
    source = "@compiled('x')\ndef f(a, b: int = 2, *, c, d=None): ...\n"
    assert parameters(source, "f") == [["a", None], ["b", "2"], ["c", None], ["d", "None"]]
    assert parameters(source, "g") is None


def test_drift_in_a_wheel_fails_and_names_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "aiter.json"
    function = {"passes": {"out": "written"}, "versions": {"9.0": [["out", None]]}}
    file.write_text(
        json.dumps({"functions": {"aiter.ops.a:f": function, "aiter.ops.b:g": {"versions": {"9.0": None}}}})
    )
    monkeypatch.setattr(aiter_contracts, "FILE", file)
    wheel = tmp_path / "amd_aiter-9.0-py3-none-any.whl"
    for body, status, said in (
        ("def f(out): ...", 0, "2 functions of 9.0 are as recorded"),
        ("def f(out, bias=None): ...", 1, "aiter.ops.a:f: recorded of 9.0: [['out', None]]; it has [['out', None], ["),
        ("def other(out): ...", 1, "it has None"),
    ):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("aiter/ops/a.py", "raise RuntimeError('ROCm version file not found')\n" + body)
        assert main([str(wheel)]) == status
        assert said in capsys.readouterr().out
    newer = wheel.rename(tmp_path / "amd_aiter-9.1-py3-none-any.whl")
    assert main([str(newer)]) == 1
    assert "nothing is recorded of 9.1" in capsys.readouterr().out


@pytest.mark.skipif("AITER_WHEEL" not in os.environ, reason="AITER_WHEEL names no wheel of amd-aiter")
def test_the_wheel_at_hand_is_as_recorded() -> None:
    assert main([os.environ["AITER_WHEEL"]]) == 0
