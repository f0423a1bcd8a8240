"""Devices as literals, by a shipped profile and the facts that a test is about; fake packages and kernels."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hal_torch
import pytest

import hal.composed
from hal.device import Device, Fact, Value, load_device
from hal.kernel import Kernel, kernel
from hal.ops.base import Op
from hal.policy import Policy
from hal.registry import Registry
from hal.runtime import Group, Runtime

if TYPE_CHECKING:
    import torch


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
    for known in [n for n in sys.modules if n == folder.name or n.startswith(f"{folder.name}.")]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def fake(
    op: type[Op[..., Any]], name: str, call: Callable[..., Any] | None = None, **declared: Any
) -> type[Kernel[Any]]:
    """A kernel of an op: its attributes (values, or functions of self), and the callable that it loads."""
    declared.setdefault("quantized", True)
    if call is not None:
        declared["load"] = lambda self, site: call
    declared |= {key: _always(value) for key, value in declared.items() if key in ("rows", "numerics", "makes")}
    return kernel(name, code=declared.pop("code", ""), serves=(op,))(type("Fake", (Kernel,), declared))


def _always(value: Any) -> Any:
    return value if callable(value) else lambda self, *_: value


def registry(*kernels: type[Kernel[Any]]) -> Registry:
    """The composed and the plain kernels, whatever else is installed, and these."""
    found = Registry.of(hal.composed.backend, hal_torch.backend)
    for each in kernels:
        found.add(each)
    return found


def runtime(
    on: Device | str = "cpu", *kernels: type[Kernel[Any]], comm: Any = None, load: bool = True, **policy: Any
) -> Runtime:
    """A runtime that runs on this CPU, whatever device the facts are of."""
    facts = load_device(on) if isinstance(on, str) else on
    return Runtime(facts, Policy.of(**policy), registry(*kernels), place="cpu", comm=comm, load=load)


def value(name: str, shape: tuple[int, ...], kind: str, mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
    """Made-up numbers, the same for the same name."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) * deviation + mean).to(getattr(torch, kind))


def fill(group: Group) -> None:
    """Equal values for equal parts, whatever the layout, into memory that held NaN; then seal."""
    import torch

    for storage in group.storages.values():
        for buffer in storage.buffers.values():
            buffer.view(torch.uint8).fill_(0xFF)
        for part in storage.parts:
            storage.put(part.name, value(part.name, part.shape, part.dtype, *part.init))
        storage.seal()
