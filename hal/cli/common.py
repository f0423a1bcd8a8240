"""Options that several verbs have, and what they stand for: device, policy, registry, runtime."""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.util import find_spec
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


def positive(text: str) -> int:
    """An argument that counts something: 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is 1 or more, got {value}")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Such arguments with commas between."""
    return tuple(positive(word) for word in text.split(","))


def need_torch(verb: str) -> None:
    """Raise HalError where torch cannot be imported, found without doing so."""
    try:
        found = find_spec("torch") is not None
    except (ImportError, ValueError):  # blocked, or half imported
        found = False
    if not found:
        raise HalError(f"{verb} runs kernels and needs torch, which is not installed: pip install 'llm-hal[torch]'")


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
