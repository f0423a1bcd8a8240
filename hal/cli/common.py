"""Options that several verbs have, and what they stand for: device, policy, registry, runtime."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.errors import HalError

if TYPE_CHECKING:
    from hal.device import Device
    from hal.registry import Registry
    from hal.runtime import Runtime


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, see docs/json.md")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="PROFILE|FILE", help="a shipped profile or a dumped file; default: probe this machine"
    )
    parser.add_argument("--stack", metavar="NAME", help="take the libraries of this shipped stack")


def add_draft(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", type=whole, default=0, metavar="N", help="the model drafts N tokens a step")


def filled(text: str) -> str:
    """An argument that names something."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got ''")
    return text


def whole(text: str, least: int = 0) -> int:
    """An argument that is a whole number of 0 or more."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of {least} or more, got {text!r}")
    return value


def positive(text: str) -> int:
    """An argument that counts something: 1 or more."""
    return whole(text, 1)


def positives(text: str) -> tuple[int, ...]:
    """Such arguments with commas between."""
    try:
        return tuple(positive(word) for word in text.split(","))
    except argparse.ArgumentTypeError:
        wanted = "whole numbers of 1 or more with commas between"
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}") from None


def need_torch(verb: str) -> None:
    """Raise HalError where torch cannot be imported, found without doing so."""
    try:
        found = find_spec("torch") is not None
    except (ImportError, ValueError):  # blocked, or half imported
        found = False
    if not found:
        raise HalError(f"{verb} runs kernels and needs torch, which is not installed: pip install 'llm-hal[torch]'")


def need_file(option: str, path: Path | None) -> None:
    """Raise HalError where a file that is asked for cannot be written at the end, found at the start."""
    if path is None:
        return
    if path.is_dir():
        raise HalError(f"{option} {path}: expected a file, got a folder")
    if not path.parent.is_dir():
        raise HalError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise HalError(f"{option} {path}: cannot be written")


def device_of(args: argparse.Namespace, registry: Registry) -> Device:
    """The device that is asked about, or the one that is here."""
    from hal.device import load_device
    from hal.probing import probe

    if args.device is not None:
        return load_device(args.device, args.stack)
    here = probe(registry.backends, registry.broken)
    return here.with_stack(args.stack) if args.stack else here


def resolving_runtime(args: argparse.Namespace, *, strict: bool = True) -> Runtime:
    """A runtime that resolves only, under the policy of ``HAL_*``. ``strict=False``: falls back quietly."""
    from hal.policy import Policy
    from hal.registry import Registry
    from hal.runtime import Runtime

    registry = Registry.installed()
    policy = Policy.from_environment()
    if not strict:
        policy = replace(policy, strict=False)
    return Runtime(device_of(args, registry), policy, registry, load=False, world=args.tp)


def broken_json(registry: Registry) -> list[dict[str, Any]]:
    """The backends, or modules of backends, that failed to import."""
    return [{"backend": lost.name, "error": lost.error} for lost in registry.broken]


def print_broken(registry: Registry) -> None:
    for lost in registry.broken:
        print(f"backend {lost.name} is broken: {lost.error}")
