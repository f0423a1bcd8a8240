"""Backends arrive through the entry point group ``hal.backends``, ours as a stranger's do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

GROUP = "hal.backends"


@dataclass(frozen=True)
class Backend:
    """What an entry point of ``hal.backends`` gives.

    ``declarations`` are modules that declare kernels and import nothing but ``hal``;
    ``probe`` is ``module:function``, a function without arguments that gives facts; ``capture``,
    ``module:function`` from a callable to (replay, its result), for devices whose vendor has this
    backend's name; ``place`` is what a tensor library calls such a device.
    """

    name: str
    declarations: tuple[str, ...] = ()
    probe: str | None = None
    capture: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class Broken:
    """A backend, or one of its modules, that could not be imported. A row in every Choice.

    ``whole``: it is the backend itself, and so its probe was not asked.
    """

    name: str
    error: str
    whole: bool = True


def said(error: BaseException) -> str:
    """An exception as one line: its type and its text, where it has one that can be made."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - a vendor's exception may fail at this too
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def load_target(target: str) -> Any:
    """The object behind ``module:attribute``."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def discover(entries: Iterable[metadata.EntryPoint] | None = None) -> tuple[list[Backend], list[Broken]]:
    """Every backend that is installed, and every one that failed to import, with its error."""
    found: list[Backend] = []
    broken: list[Broken] = []
    for entry in metadata.entry_points(group=GROUP) if entries is None else entries:
        try:
            backend = entry.load()
            if not isinstance(backend, Backend):
                raise TypeError(f"{entry.value} is a {type(backend).__name__}, not a hal.backend.Backend")
            found.append(backend)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a package raises becomes a row
            broken.append(Broken(entry.name, said(error)))
    return sorted(found, key=lambda b: b.name), sorted(broken, key=lambda b: b.name)
