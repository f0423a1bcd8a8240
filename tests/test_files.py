"""Files of a checkpoint: what is missing, cut short, foreign or malformed is an error that names it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hal_models.files import INDEX, Files
from safetensors.torch import save_file

from hal.errors import CheckpointError

NAMES = ("a", "b", "c")


def whole(name: str) -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6) + 100 * NAMES.index(name)


def single(folder: Path) -> Path:
    save_file({name: whole(name) for name in NAMES}, folder / "model.safetensors")
    return folder / "model.safetensors"


def sharded(folder: Path, **placed: Any) -> Path:
    """Tensors a and b in one file, c in another; the index says so unless told otherwise."""
    save_file({"a": whole("a"), "b": whole("b")}, folder / "one.safetensors")
    save_file({"c": whole("c")}, folder / "two.safetensors")
    places = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", **placed}
    (folder / INDEX).write_text(json.dumps({"weight_map": {k: v for k, v in places.items() if v is not None}}))
    return folder / INDEX


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error, Files(folder):
        pass
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("write", [single, sharded])
def test_tensors_are_read_whole_and_in_part(write: Callable[[Path], Path], tmp_path: Path) -> None:
    write(tmp_path)
    with Files(tmp_path) as files:
        assert sorted(files) == list(NAMES)
        assert len(files) == 3
        assert "a" in files
        assert "d" not in files
        for name in NAMES:
            assert files.shape(name) == (4, 6)
            assert torch.equal(files.read(name), whole(name))
            assert torch.equal(files.read(name, slice(1, 3)), whole(name)[1:3])
            assert torch.equal(files.read(name, slice(None), slice(2, 5)), whole(name)[:, 2:5])


def test_a_scalar_is_read(tmp_path: Path) -> None:
    save_file({"scale": torch.tensor(0.5)}, tmp_path / "model.safetensors")
    with Files(tmp_path) as files:
        assert files.shape("scale") == ()
        assert float(files.read("scale")) == 0.5


def test_files_without_an_index_are_taken_together(tmp_path: Path) -> None:
    sharded(tmp_path).unlink()
    with Files(tmp_path) as files:
        assert sorted(files) == list(NAMES)


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"anything")
    with Files(tmp_path) as files:
        assert sorted(files) == list(NAMES)


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        ({"c": "three.safetensors"}, ("three.safetensors", "missing")),
        ({"c": "one.safetensors"}, (INDEX, "do not hold: c in one.safetensors")),
        ({"a": "two.safetensors"}, ("one.safetensors", "holds a", "does not place there")),
        ({"b": None}, ("one.safetensors", "holds b", "does not place there")),
        ({"d": "two.safetensors"}, (INDEX, "do not hold: d in two.safetensors")),
        ({"c": "../two.safetensors"}, (INDEX, "outside the folder: '../two.safetensors'")),
        ({"c": "/etc/passwd"}, (INDEX, "outside the folder: '/etc/passwd'")),
        ({"c": "sub/two.safetensors"}, (INDEX, "outside the folder: 'sub/two.safetensors'")),
        ({"c": ".."}, (INDEX, "outside the folder: '..'")),
        ({"c": ""}, (INDEX, "outside the folder: ''")),
    ],
    ids=["no such file", "wrong file", "moved", "unlisted", "absent", "above", "absolute", "below", "parent", "empty"],
)
def test_an_index_that_does_not_fit_the_files(placed: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    sharded(tmp_path, **placed)
    refused(tmp_path, *words)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"weight_map": 1}', '{"weight_map": ["a"]}', "\ud800"])
def test_a_malformed_index(text: str, tmp_path: Path) -> None:
    sharded(tmp_path).write_bytes(text.encode(errors="surrogatepass"))
    refused(tmp_path, INDEX, "cannot be read")


def test_an_index_of_nothing(tmp_path: Path) -> None:
    sharded(tmp_path, a=None, b=None, c=None)
    refused(tmp_path, INDEX, "lists no tensors")


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    sharded(tmp_path).unlink()
    save_file({"c": whole("c")}, tmp_path / "three.safetensors")
    refused(tmp_path, "two.safetensors", "holds c, as another file does too")


@pytest.mark.parametrize("left", [0, 1, 7, 8, 9, 60, -289, -288, -145, -1])
@pytest.mark.parametrize("write", [single, sharded])
def test_a_file_cut_short(write: Callable[[Path], Path], left: int, tmp_path: Path) -> None:
    """In the header's length, in the header, at its end, in the data."""
    write(tmp_path)
    path = next(tmp_path.glob("[mo]*.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:left])
    refused(tmp_path, str(path), "truncated or corrupt")


@pytest.mark.parametrize(
    "data",
    [b"\x00" * 64, b"\xff" * 64, b"garbage, and more of it", b"PK\x03\x04" + b"\x00" * 60, b"version https://git-lfs"],
    ids=["zeros", "ones", "text", "zip", "pointer"],
)
def test_garbage(data: bytes, tmp_path: Path) -> None:
    path = single(tmp_path)
    path.write_bytes(data)
    refused(tmp_path, str(path), "truncated or corrupt")


def test_bytes_after_the_end(tmp_path: Path) -> None:
    path = single(tmp_path)
    path.write_bytes(path.read_bytes() + b"more")
    refused(tmp_path, str(path))


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "model.safetensors", "truncated or corrupt")


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    torch.save({"a": whole("a")}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, str(tmp_path), "no .safetensors file")
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors", "truncated or corrupt")


def test_an_error_inside_closes_the_files(tmp_path: Path) -> None:
    single(tmp_path)
    files = Files(tmp_path)
    with pytest.raises(ZeroDivisionError), files:
        _ = 1 / 0
    assert "a" not in files


RESIDENT = """
import os, sys
from pathlib import Path
import torch
from hal_models.files import Files

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

with Files(Path(sys.argv[1])) as files:
    files.read("weight", slice(0, 1))
    before = resident()
    rows = files.read("weight", slice(100, 102)), files.read("weight", slice(500, 501), slice(0, 9))
    print(resident() - before, float(rows[0].sum()))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts resident pages in /proc")
def test_only_what_is_read_becomes_resident(tmp_path: Path) -> None:
    rows, columns = 1024, 1 << 16
    size = 4 * rows * columns
    header = json.dumps({"weight": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # a hole: no disk is used
    out = subprocess.run([sys.executable, "-c", RESIDENT, str(tmp_path)], capture_output=True, text=True, check=True)
    grown, total = map(float, out.stdout.split())
    assert total == 0
    assert grown < size / 8
