"""A probe starts nothing where there is nothing, and answers from a child process where there is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hal_cuda.probe as cuda
import hal_rocm.probe as rocm
import hal_torch.probe as cpu
import pytest
from facts import package

from hal.device import Fact

BUILT = {"cuda": "cuda = '13.0'", "rocm": "hip = '7.1'"}
H200 = {"major": 9, "minor": 0, "name": "NVIDIA H200"}
MI355X = {"major": 9, "minor": 5, "name": "AMD Instinct MI355X", "gcnArchName": "gfx950:sramecc+:xnack-"}
DRIVERS = {"dev/nvidiactl": "", "dev/kfd": "", "sys/module/nvidia/version": "580.65.06\n"}
DRIVERS |= {"sys/module/amdgpu/version": "6.14.14\n"}


def write(root: Path, files: dict[str, str]) -> Path:
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


@pytest.fixture
def root(tmp_path) -> Path:
    """A root folder with the files of both drivers."""
    return write(tmp_path / "root", DRIVERS)


@pytest.fixture(autouse=True)
def _only_what_a_test_installs(monkeypatch, tmp_path) -> None:
    """No torch loaded, no cuda.core, every device visible, no library outside the root."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    package(monkeypatch, tmp_path / "cuda", __init__="raise ImportError('blocked')")
    for name in (*rocm.VISIBLE, "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)


def install_torch(monkeypatch, folder: Path, built: str, fails: str = "", **properties) -> None:
    """A torch for child processes; its version.py says what it is built with."""
    text = f"{fails}\nfrom types import SimpleNamespace as N\nfrom torch import version\n"
    text += f"ask = N(**{properties!r})\nget = {{'get_device_properties': lambda index: ask}}\n"
    text += "cuda = N(device_count=lambda: 1, current_device=lambda: 0, **get)\n"
    package(monkeypatch, folder / "torch", __init__=text, version=f"cuda = None\nhip = None\n{built}\n")


QUIET = """
import json, os, sys
from pathlib import Path
before = dict(os.environ)
import hal, hal_cuda.probe, hal_rocm.probe
from hal.backend import Backend
backends = [Backend(name, probe=f"hal_{name}.probe:probe") for name in ("cuda", "rocm", "torch")]
here, root = hal.probe(backends), Path(sys.argv[1])
said = [module.probe(root)["vendor"].why for module in (hal_cuda.probe, hal_rocm.probe)]
heavy = {"torch", "triton", "aiter", "flashinfer", "cuda", "fla", "numpy"} & set(sys.modules)
print(json.dumps([here.value("vendor"), said, dict(os.environ) == before, sorted(heavy)]))
"""


def test_a_fresh_process_that_may_see_no_device_finds_none_and_starts_nothing(root) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", QUIET, root],
        env=os.environ | hidden,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = ["no device (CUDA_VISIBLE_DEVICES is empty)", "no device (HIP_VISIBLE_DEVICES is empty)"]
    assert json.loads(done.stdout) == ["cpu", said, True, []]


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (cuda.probe, "no driver (libcuda.so.1 is not found)"),
        (rocm.probe, "no driver (/dev/kfd is not there)"),
    ],
)
def test_without_a_driver_there_is_no_device(probe, why: str, tmp_path) -> None:
    facts = probe(tmp_path)
    assert facts["vendor"] == Fact(None, "probed", why)
    assert "driver" not in facts


@pytest.mark.parametrize("name", rocm.VISIBLE)
def test_an_empty_list_of_visible_devices_is_no_device(name: str, root, monkeypatch, tmp_path) -> None:
    install_torch(monkeypatch, tmp_path, BUILT["rocm"], **MI355X)
    monkeypatch.setenv(name, "")
    assert rocm.probe(root)["vendor"] == Fact(None, "probed", f"no device ({name} is empty)")


def test_hip_reads_its_own_variable_first(root, monkeypatch, tmp_path) -> None:
    install_torch(monkeypatch, tmp_path, BUILT["rocm"], **MI355X)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert rocm.probe(root)["vendor"].value == "rocm"


@pytest.mark.parametrize("file", ["dev/nvidiactl", "dev/dxg", "proc/driver/nvidia/version", "etc/ld.so.cache", None])
def test_a_cuda_driver_is_known_by_its_files(file: str | None, monkeypatch, tmp_path) -> None:
    install_torch(monkeypatch, tmp_path, "")
    root = write(tmp_path / "root", {file or "lib/libcuda.so.1": "libcuda.so.1"})
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{root / 'lib'}")
    vendor = cuda.probe(root)["vendor"]
    assert (vendor.source, vendor.why.endswith("is built without cuda")) == ("probed", True)


@pytest.mark.parametrize(
    ("probe", "built", "why"),
    [
        (cuda.probe, BUILT["rocm"], "torch is built for ROCm (HIP 7.1)"),
        (rocm.probe, BUILT["cuda"], "torch 2.12 is built without hip"),
        (cuda.probe, "", "torch 2.12 is built without cuda"),
    ],
)
def test_a_torch_of_the_other_kind_is_not_asked(probe, built: str, why: str, root, monkeypatch, tmp_path) -> None:
    install_torch(monkeypatch, tmp_path, f"{built}\n__version__ = '2.12'", fails="raise OSError", **H200 | MI355X)
    assert probe(root)["vendor"] == Fact(None, "probed", why)


@pytest.mark.parametrize(
    ("vendor", "probe", "properties", "arch", "driver"),
    [
        ("cuda", cuda.probe, H200, "sm_90", "580.65.06"),
        ("rocm", rocm.probe, MI355X, "gfx950", "6.14.14"),
    ],
)
def test_torch_is_asked_in_a_child(vendor, probe, properties, arch, driver, root, monkeypatch, tmp_path) -> None:
    install_torch(monkeypatch, tmp_path, BUILT[vendor], **properties)
    facts = probe(root)
    assert [facts[name].value for name in ("vendor", "arch", "driver")] == [vendor, arch, driver]
    assert facts[vendor].value == BUILT[vendor].split("'")[1]
    assert "torch" not in sys.modules


@pytest.mark.parametrize(("vendor", "probe"), [("cuda", cuda.probe), ("rocm", rocm.probe)])
def test_a_torch_that_fails_there_is_a_failed_vendor_beside_the_libraries(
    vendor, probe, root, monkeypatch, tmp_path
) -> None:
    install_torch(monkeypatch, tmp_path, BUILT[vendor], fails="raise OSError('libamdhip64.so')")
    facts = probe(root)
    assert (facts["vendor"].value, facts["vendor"].source) == (None, "failed")
    assert facts["vendor"].why.endswith("OSError: libamdhip64.so")
    assert facts[vendor].source == "probed"


def test_a_torch_that_has_started_cuda_here_is_asked_here(root, monkeypatch, tmp_path) -> None:
    install_torch(monkeypatch, tmp_path, BUILT["cuda"], fails="raise OSError('asked in a child')")
    spec = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    ask = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 1, current_device=lambda: 3)
    ask.get_device_properties = lambda index: SimpleNamespace(**H200 | {"name": f"number {index}"})
    torch = SimpleNamespace(__spec__=spec, version=SimpleNamespace(hip=None), cuda=ask)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    assert cuda.probe(root)["name"] == Fact("number 3", "probed", "torch")


def compiler(folder: Path, text: str) -> Path:
    """A program ``bin/nvcc`` in a folder."""
    found = folder / "bin" / "nvcc"
    found.parent.mkdir(parents=True)
    found.write_text(f"#!/bin/sh\n{text}\n")
    found.chmod(0o755)
    return found


def test_the_compiler_is_that_of_cuda_home_or_of_path(root, monkeypatch, tmp_path) -> None:
    told = "echo 'Cuda compilation tools, release 13.0, V13.0.88'"
    in_home, in_path = compiler(tmp_path / "home", told), compiler(tmp_path / "other", told.replace("13.0", "12.9"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{in_path.parent}:/bin")
    assert cuda.probe(root)["nvcc"] == Fact("12.9", "probed", str(in_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert cuda.probe(root)["nvcc"] == Fact("13.0", "probed", str(in_home))
    in_home.write_text("#!/bin/sh\necho no release\n")
    assert cuda.probe(root)["nvcc"] == Fact(None, "failed", f"{in_home} --version: names no release")
    in_home.write_text("#!/bin/sh\nexit 3\n")
    assert cuda.probe(root)["nvcc"].source == "failed"
    in_home.unlink()  # CUDA_HOME alone counts where it is set
    assert cuda.probe(root)["nvcc"] == Fact(None, "probed", f"{in_home} is not there")


@pytest.mark.parametrize("error", [KeyError("gfx1201"), RuntimeError(), OSError(), ImportError(), SystemExit(1)])
def test_aiter_that_would_fail_at_import_is_broken_and_never_imported(error, monkeypatch, tmp_path) -> None:
    text = f"open(__file__ + '.ran', 'w')\nraise {error!r}"
    folder = package(monkeypatch, tmp_path / "aiter", __init__=text)
    why = f"module aiter is there ({folder / '__init__.py'}), but no distribution amd-aiter or aiter"
    assert rocm.probe(tmp_path)["aiter"] == Fact(None, "failed", why)
    assert [path.name for path in folder.iterdir()] == ["__init__.py"]


def test_the_cpu_is_described_by_its_files(tmp_path) -> None:
    cache = "sys/devices/system/cpu/cpu0/cache"
    files = {"proc/cpuinfo": "processor : 0\nmodel name\t: A CPU: fast\n", f"{cache}/index1/level": "1\n"}
    files |= {f"{cache}/index0/level": "1\n", f"{cache}/index0/size": "48K\n"}
    files |= {f"{cache}/index3/level": "3\n", f"{cache}/index3/size": "32M\n"}
    facts = cpu.probe(write(tmp_path, files))
    assert (facts["name"].value, facts["l2_bytes"].value) == ("A CPU: fast", 32 * 2**20)
    empty = cpu.probe(tmp_path / "empty")
    assert (empty["name"].source, empty["l2_bytes"].value) == ("failed", None)
