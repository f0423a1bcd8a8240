"""Finding what was decided for an op in a bound model, and deciding anew with other fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hal.choice import Choice, rows_text
from hal.cli.changes import changed, check_known
from hal.errors import HalError, UnknownName
from hal.ops.base import Op
from hal.report import pattern
from hal.runtime import Group, Runtime

AnyOp = type[Op[..., Any]]


@dataclass(frozen=True)
class Decision:
    """One outcome for an op, the sites that share it, and the ops resolved together with it."""

    choice: Choice
    sites: tuple[str, ...]
    group: Mapping[str, str]
    fell_back: str

    @property
    def site(self) -> str:
        """The sites as one text, with ``*`` for their numbers."""
        if len(self.sites) == 1:
            return self.sites[0]
        return ", ".join(dict.fromkeys(map(pattern, self.sites)))


def decisions(
    runtime: Runtime, op: AnyOp, changes: Mapping[str, str] | None = None, glob: str | None = None
) -> list[Decision]:
    """Each distinct decision about an op, in the order of binding; none where the model has no such op.

    ``changes``: fields set by hand; groups with such a field are resolved anew, the others left out.
    ``glob``: only sites that match. Raises UnknownName for a field or a site that is not there.
    """
    groups = [g for g in runtime.groups if any(True for _ in _found(g.name, g.choices, op))]
    if glob is not None and groups:
        groups = _at(groups, op, glob)
    if changes and groups:
        check_known([member for g in groups for member in g.members.values()], changes)
    seen: dict[Any, tuple[Decision, list[str]]] = {}
    for group in groups:
        choices = _again(runtime, group, changes) if changes else group.choices
        if choices is None:
            continue
        together = {name: kernels(choice) for name, choice in choices.items()} if len(choices) > 1 else {}
        for site, choice, whole in _found(group.name, choices, op):
            if glob is not None and not (fnmatchcase(site, glob) or fnmatchcase(group.name, glob)):
                continue
            key = (choice.op, choice.shape(), whole.fell_back, choice.candidates, tuple(p.why for p in choice.pieces))
            decision = Decision(choice, (), together, _story(choice, whole))
            seen.setdefault(key, (decision, []))[1].append(site)
    return [Decision(d.choice, tuple(dict.fromkeys(at)), d.group, d.fell_back) for d, at in seen.values()]


def _found(name: str, choices: Mapping[str, Choice], op: AnyOp) -> Iterator[tuple[str, Choice, Choice]]:
    """Site, choice and the whole it belongs to, for each of that op among members and their parts."""
    for member, whole in choices.items():
        site = name if member == "op" else f"{name}.{member}"
        for part, choice in whole.walk():
            if type(choice.op) is op:
                yield f"{site}.{part}" if part else site, choice, whole


def _at(groups: list[Group], op: AnyOp, glob: str) -> list[Group]:
    sites = {g.name: [site for site, _, _ in _found(g.name, g.choices, op)] for g in groups}
    chosen = [g for g in groups if any(fnmatchcase(site, glob) for site in (g.name, *sites[g.name]))]
    if not chosen:
        known = dict.fromkeys(pattern(site) for at in sites.values() for site in at)
        raise UnknownName(f"site of {op.title()}", glob, known)
    return chosen


def _again(runtime: Runtime, group: Group, changes: Mapping[str, str]) -> dict[str, Choice] | None:
    """The group's choices with fields changed; nothing where it has none of them."""
    members = {name: changed(op, changes) for name, op in group.members.items()}
    if not any(hasattr(op, name) for op in members.values() for name in changes):
        return None
    fed = group.fed and "x" not in changes
    try:
        found = runtime.resolver.resolve(
            tuple(members.values()), runtime.policy.at(group.name), fixed=group.fixed, fed=fed
        )
    except HalError as error:
        raise type(error)(f"{group.name}: {error}") if not isinstance(error, UnknownName) else error from None
    return dict(zip(members, found, strict=True))


def kernels(choice: Choice) -> str:
    """``torch.linear``, or one kernel per range of rows."""
    if len(choice.pieces) == 1:
        return choice.pieces[0].kernel.name
    return ", ".join(f"{rows_text(p.rows)} {p.kernel.name}" for p in choice.pieces)


def _story(choice: Choice, whole: Choice) -> str:
    if choice is whole or not whole.fell_back:
        return whole.fell_back
    return f"{whole.op.title()}, which it is a part of: {whole.fell_back}"
