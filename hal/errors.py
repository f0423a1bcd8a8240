"""The errors of the layer. Each names what was asked, what was expected and what came."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HalError(Exception):
    """Base of every error that this project raises on purpose."""


class UnknownName(HalError):  # noqa: N818 - reads as what it is
    """A name outside a closed list; the message names the nearest one."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        folded = [n for n in names if n.lower() == name.lower()]
        nearest = next(iter([*folded, *near]), None)
        hint = f"did you mean {nearest!r}?" if nearest else f"known: {', '.join(names) or 'none'}"
        super().__init__(f"unknown {what} {name!r}; {hint}")
        self.nearest = nearest


class DuplicateName(HalError):  # noqa: N818
    """The same name registered twice."""


class PolicyError(HalError):
    """What the policy asks for cannot be had, or cannot be read."""


class UnresolvedError(HalError):
    """No kernel serves an op; the message ends with the reason of every kernel."""


class BindError(HalError):
    """A chosen kernel failed to load, or a binding was left half done."""


class CheckError(HalError):
    """An argument does not fit its op's signature."""


class StorageError(HalError):
    """A parameter was put where it does not fit, or was left out."""


class CheckpointError(HalError):
    """A file or its configuration cannot be taken as it is."""


class DivisionError(HalError):
    """A size does not divide over the ranks."""
