"""Devices as literals, by a shipped profile and the facts that a test is about; and fake packages."""

import sys
from pathlib import Path

import pytest

from hal.device import Device, Fact, Value, load_device


def device(label: str = "h200", **changed: Value) -> Device:
    """``device("mi300x", aiter=None)``: the profile, these facts declared otherwise."""
    return load_device(label).replaced(**changed)


def here(label: str = "h200", **changed: Fact) -> Device:
    """The profile as if a probe had answered it, with these facts and sources: failed ones, say."""
    profile = load_device(label)
    return Device("here", "installed", {name: profile[name] for name in profile} | changed)


def package(monkeypatch: pytest.MonkeyPatch, folder: Path, **files: str) -> Path:
    """A top-level package on the path, never imported before; files by stem."""
    folder.mkdir()
    for stem, text in files.items():
        (folder / f"{stem}.py").write_text(text)
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder
