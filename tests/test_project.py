"""The README's and CONTRIBUTING's words hold: paths exist, examples run, every op and kernel is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import hal
from hal.cli import main
from hal.kernel import TIERS, Kernel
from hal.ops import COARSE, FINE, OPS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
REGISTRY = hal.Registry.installed()
KERNELS = [(op, name) for op in OPS.values() for name in REGISTRY.names(op)]


def kernel_of(op: type[Any], name: str) -> Kernel[Any]:
    return next(k for k in REGISTRY.kernels(op) if k.name == name)


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_paths_exist(text: str) -> None:
    named = re.findall(r"\]\(([\w./]+)\)|`((?:hal|backends|models|docs|tests)/[\w./]+)`", text)
    assert named
    for link, path in named:
        assert (ROOT / (link or path)).exists(), link or path


def test_contributing_names_what_an_op_and_a_kernel_have() -> None:
    ops, kernels = CONTRIBUTING.split("## A new kernel")
    for name in ("signature", "params", "states", "reference", "cases"):
        assert f"`{name}`" in ops
        assert callable(getattr(next(iter(OPS.values())), name))
    for name in (
        "needs",
        "refuses",
        "reads",
        "layouts",
        "takes",
        "makes",
        "rows",
        "numerics",
        "tier",
        "launches",
        "parts",
    ):
        assert f"`{name}`" in kernels
        assert hasattr(Kernel, name)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_op_is_complete(op: Any) -> None:
    assert (op in COARSE) != (op in FINE)
    assert op.coarse == (op in COARSE)
    assert op.title() in hal.ops.__all__
    assert len((op.__doc__ or "").strip()) > 30
    cases = op.cases()
    assert cases
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert type(case.op) is op
        assert hash(case.op) == hash(type(case.op)(**vars(case.op)))
        assert case.op.signature().rows_of()
        assert case.op.traffic(4).bytes > 0


def test_every_op_is_served_by_plain_torch() -> None:
    served = {op for op, name in KERNELS if name.startswith(("torch.", "composed."))}
    assert {op.title() for op in OPS.values() if op not in served} == set()


@pytest.mark.parametrize(("op", "name"), KERNELS, ids=[f"{op.title()}-{name}" for op, name in KERNELS])
def test_every_kernel_is_complete(op: Any, name: str) -> None:
    found = kernel_of(op, name)
    assert re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", name)
    assert (type(found).__doc__ or "").strip().endswith(".")
    assert found.tier in TIERS
    assert type(found).__module__ not in found.code, "code stands in a second module"


def test_the_readme_s_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


COMMANDS = [
    line.partition("#")[0].split()[1:]
    for line in re.findall(r"^    (hal [^\n]*)", README, re.M)
    if "PATH/TO" not in line and "verify" not in line
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_readme_s_commands_run(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # as diff(1), it tells by its status that something differs
    assert main([word.strip("'\"") for word in command]) == (command[0] == "diff")
    assert capsys.readouterr().out.strip()
