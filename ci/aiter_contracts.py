"""The aiter functions that are called here: which names they take in which version, and whether that still holds.

``python ci/aiter_contracts.py WHEEL [--write]``. Sources are parsed, never imported: importing aiter
compiles, or fails without ROCm. ``contracts/aiter.json`` holds for each function the names passed and
what they mean, and its parameters by version: those of a wheel are derived again here and must be what
is recorded; those of newer versions, which no wheel holds, stand as recorded. Exit status 1 on drift.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "contracts" / "aiter.json"


def contracts() -> dict[str, Any]:
    """The recorded file."""
    return dict(json.loads(FILE.read_text()))


def parameters(source: str, function: str) -> list[list[str | None]] | None:
    """Name and default (as written; None where it is required) of each parameter, or None where there is none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            args = node.args
            positional = [*args.posonlyargs, *args.args]
            defaults = [None] * (len(positional) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
            named = [None if d is None else ast.unparse(d) for d in args.kw_defaults]
            pairs = [*zip(positional, defaults, strict=True), *zip(args.kwonlyargs, named, strict=True)]
            return [[arg.arg, default] for arg, default in pairs]
    return None


def of_wheel(wheel: Path, names: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the functions (``module:function``) in a wheel; None where it lacks one."""
    found: dict[str, Any] = {}
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        for name in names:
            module, function = name.split(":")
            file = module.replace(".", "/") + ".py"
            found[name] = parameters(archive.read(file).decode(), function) if file in files else None
    return found


def version_of(wheel: Path) -> str:
    """The version in a wheel's name."""
    return wheel.name.split("-")[1]


def drift(recorded: Mapping[str, Any], derived: Mapping[str, Any], version: str) -> Iterator[str]:
    """Where a wheel differs from what is recorded of its version."""
    for name, contract in recorded["functions"].items():
        if version not in contract["versions"]:
            yield f"{name}: nothing is recorded of {version}"
        elif contract["versions"][version] != derived[name]:
            yield f"{name}: recorded of {version}: {contract['versions'][version]}; it has {derived[name]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--write", action="store_true", help="record what the wheel has")
    args = parser.parse_args(arguments)
    recorded, version = contracts(), version_of(args.wheel)
    derived = of_wheel(args.wheel, recorded["functions"])
    if args.write:
        for name, found in derived.items():
            recorded["functions"][name]["versions"][version] = found
        FILE.write_text(json.dumps(recorded, indent=1) + "\n")
        return 0
    found = list(drift(recorded, derived, version))
    print("\n".join(found) or f"{len(derived)} functions of {version} are as recorded")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
