"""A wheel built from the sdist, in an empty environment without torch, answers questions."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("hal", "hal_torch", "hal_triton", "hal_cuda", "hal_rocm", "hal_models")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert len(list(out.glob("*.tar.gz"))) == 1
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    for path in ("hal/devices", "hal/stacks"):
        shipped = {f"{path}/{p.name}" for p in (ROOT / path).glob("*.json")}
        assert shipped <= set(names)
    assert "hal_models/tiny/dense/model.safetensors" in names


def test_it_answers_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)

    def hal(*words: str) -> str:
        done = subprocess.run(
            [str(python.parent / "hal"), *words], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "InProj" in hal("ops")
    answer = json.loads(hal("explain", "InProj", "--device", "h200", "--model", "qwen3.5-27b", "--tp", "8", "--json"))
    assert answer["schema"] == "hal.explain/1"
    assert answer["pieces"][0]["chosen"].startswith("triton.")
    assert "GatedDeltaDecode" in hal("plan", "qwen3.5-397b-a17b", "--device", "mi300x")
    profile = tmp_path / "mine.json"
    profile.write_text(hal("dump", "--json"))
    bare = [str(python.parent / "hal"), "explain", "Linear", "--device", str(profile)]
    refused = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "torch" in refused.stderr + refused.stdout
