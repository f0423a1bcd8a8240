"""The command line. Each verb is two names, ``module:function``, imported only when it is asked for."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hal.errors import HalError

Command = tuple[str, str, str, str]
COMMANDS: tuple[Command, ...] = (
    ("dump", "hal.cli.dump:add_arguments", "hal.cli.dump:run", "the device here: every fact with its source"),
    ("ops", "hal.cli.ops:add_arguments", "hal.cli.ops:run", "the logical ops, their contracts and kernels"),
    ("explain", "hal.cli.explain:add_arguments", "hal.cli.explain:run", "why an op runs the kernel it runs"),
    ("plan", "hal.cli.plan:add_arguments", "hal.cli.plan:run", "every choice of a whole model, and its bytes"),
    ("matrix", "hal.cli.matrix:add_arguments", "hal.cli.matrix:run", "ops by devices: kernel, reason, evidence"),
    ("diff", "hal.cli.diff:add_arguments", "hal.cli.diff:run", "two devices: facts and choices that differ"),
    ("verify", "hal.cli.verify:add_arguments", "hal.cli.verify:run", "kernels against the float64 oracle, here"),
    ("bench", "hal.cli.bench:add_arguments", "hal.cli.bench:run", "kernels timed side by side, here"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. 0: fine, 1: a demand that cannot be met, 2: a wrong call."""
    _open_streams()
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except HalError as error:
        print(f"hal: {error}", file=sys.stderr)
        return 1
    except SystemExit as left:  # argparse's own way out
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EBADF, errno.EIO, errno.ENOSPC):
            raise
        _drop_output()
        print(f"hal: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _open_streams() -> None:
    """Where a stream was closed by the caller (``>&-``), what is written to it goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the end


def _drop_output() -> None:
    """What is left in the buffer has nowhere to go: do not fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    asked = next((word for word in argv if not word.startswith("-")), None)
    commands, two = list(COMMANDS), " ".join(argv[:2])
    if asked not in {name for name, *_ in commands}:
        commands += _of_families(asked)
    elif argv[1:2] and argv[1].islower():
        # perhaps a family's verb of two words, such as bench e2e; ops have capitals
        theirs = _of_families(None)
        if two in {name for name, *_ in theirs}:
            asked, argv, commands = two, [two, *argv[2:]], theirs
    parser = argparse.ArgumentParser(
        prog="hal", description="Which kernel runs each op of a model on a device, and why no other does."
    )
    from hal import __version__

    parser.add_argument("--version", action="version", version=f"hal {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    runs: dict[str, str] = {}
    for name, add_arguments, run, text in commands:
        verb = verbs.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
        if name == asked:
            _load(name, add_arguments)(verb)
            runs[name] = run
    args = parser.parse_args(argv)
    return int(_load(args.verb, runs[args.verb])(args))


def _of_families(asked: str | None) -> list[Command]:
    """The verbs of model families; a broken family may have had the one that is asked for."""
    from hal.family import families

    found, broken = families()
    ours = {name for name, *_ in COMMANDS}
    commands = [command for family in found for command in family.commands if command[0] not in ours]
    if asked and broken and asked not in {name for name, *_ in commands}:
        listed = "; ".join(f"family {b.name}: {b.error}" for b in broken)
        raise HalError(f"unknown command {asked!r}; it may be one of a family that failed to import: {listed}")
    return commands


def _load(verb: str, target: str) -> Callable[..., Any]:
    from hal.backend import load_target, said

    try:
        loaded: Callable[..., Any] = load_target(target)
    except Exception as error:
        raise HalError(f"{verb}: {target} cannot be imported: {said(error)}") from error
    return loaded
