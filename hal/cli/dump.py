"""``hal dump``: a device's facts, each with its source, and the backends that are here."""

from __future__ import annotations

import argparse

from hal.cli.common import add_device, add_json, device_of
from hal.cli.show import print_json, print_table
from hal.registry import Registry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    registry = Registry.installed()
    device = device_of(args, registry)
    if args.json:
        print_json(device.to_json())
        return 0
    print(f"device {device.label}, stack {device.stack}")
    facts = [(name, device[name]) for name in device]
    print_table(
        ("fact", "value", "source", "why"),
        [(n, "unknown" if f.value is None else f.value, f.source, f.why) for n, f in facts],
    )
    print()
    lost = {b.name for b in registry.broken}
    rows = [
        (b.name, "installed", f"{len(b.declarations)} modules of kernels" + (", a probe" if b.probe else ""))
        for b in registry.backends
        if b.name not in lost
    ]
    rows += [(b.name, "broken", b.error) for b in registry.broken]
    print_table(("backend", "state", "what"), rows)
    return 0
