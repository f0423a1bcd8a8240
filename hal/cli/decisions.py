"""Finding what was decided for an op in a bound model, and deciding anew with other fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from hal.binding import Group
from hal.choice import Choice
from hal.cli.changes import changed, check_known
from hal.errors import HalError, UnknownName
from hal.layout import Layout
from hal.ops.base import Op
from hal.report import pattern
from hal.runtime import Runtime

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
    decided = []
    for group in _with(runtime, op, changes, glob):
        choices = _again(runtime, group, changes) if changes else group.choices
        if choices is not None:
            decided.append((group.name, choices))
    return _distinct(decided, op, glob)


def decisions_alone(
    runtime: Runtime, built: Runtime, op: AnyOp, changes: Mapping[str, str] | None = None, glob: str | None = None
) -> list[Decision]:
    """As ``decisions``, where the whole model cannot be had: each group of ``built`` by itself.

    Problems are those of ``built``, a runtime elsewhere; they are resolved on ``runtime``'s device
    under its policy, layouts open. Raises what the resolver says of the op where nothing serves it.
    """
    groups = _with(built, op, changes, glob)
    decided = []
    for group in groups:
        try:
            choices = _again(runtime, replace(group, fixed={}), changes or {})
        except HalError:
            if any(type(member) is op for member in group.members.values()):
                raise
            continue
        if choices is not None:
            decided.append((group.name, choices))
    if found := _distinct(decided, op, glob):
        return found
    # no whole that can be had has it as a part: the part by itself
    parts = [
        (site, {"op": choice})
        for group in groups
        for site, part, _ in _found(group.name, group.choices, op)
        if glob is None or fnmatchcase(site, glob) or fnmatchcase(group.name, glob)
        for choice in [_resolved(runtime, site, (changed(part.op, changes or {}),))[0]]
    ]
    return _distinct(parts, op, None)


def sites(runtime: Runtime) -> dict[str, Choice]:
    """What was chosen at each site that is bound."""
    return {group.site(member): choice for group in runtime.groups for member, choice in group.choices.items()}


def sites_alone(runtime: Runtime, built: Runtime) -> dict[str, tuple[Op[..., Any], Choice | HalError]]:
    """Op and outcome at each site where the whole model cannot be had: each group of ``built`` by itself."""
    found: dict[str, tuple[Op[..., Any], Choice | HalError]] = {}
    for group in built.groups:
        try:
            choices: Mapping[str, Choice | HalError] = _again(runtime, replace(group, fixed={}), {}) or {}
        except HalError as error:
            choices = dict.fromkeys(group.members, error)
        found |= {group.site(member): (group.members[member], answer) for member, answer in choices.items()}
    return found


def alone(runtime: Runtime, site: str, op: Op[..., Any]) -> Choice | HalError:
    """What serves one op by itself under the policy of a site, or why nothing does."""
    try:
        return _resolved(runtime, site, (op,))[0]
    except HalError as error:
        return error


def _with(runtime: Runtime, op: AnyOp, changes: Mapping[str, str] | None, glob: str | None) -> list[Group]:
    """The groups that have the op, at sites that match; fields and sites are checked."""
    groups = [g for g in runtime.groups if any(True for _ in _found(g.name, g.choices, op))]
    if glob is not None and groups:
        groups = _at(groups, op, glob)
    if changes and groups:
        check_known([member for g in groups for member in g.members.values()], changes)
    return groups


def _distinct(decided: list[tuple[str, dict[str, Choice]]], op: AnyOp, glob: str | None) -> list[Decision]:
    """Groups' choices as decisions about the op, sites that were decided alike together."""
    seen: dict[Any, tuple[Decision, list[str]]] = {}
    for name, choices in decided:
        together = {member: choice.kernels() for member, choice in choices.items()} if len(choices) > 1 else {}
        for site, choice, whole in _found(name, choices, op):
            if glob is not None and not (fnmatchcase(site, glob) or fnmatchcase(name, glob)):
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
    """The group's choices with fields changed; nothing where it has none of those."""
    members = {name: changed(op, changes) for name, op in group.members.items()}
    if changes and not any(hasattr(op, name) for op in members.values() for name in changes):
        return None
    fed = group.fed and "x" not in changes
    found = _resolved(runtime, group.name, tuple(members.values()), group.fixed, fed)
    return dict(zip(members, found, strict=True))


def _resolved(
    runtime: Runtime,
    site: str,
    ops: tuple[Op[..., Any], ...],
    fixed: Mapping[str, Layout] | None = None,
    fed: bool = False,
) -> tuple[Choice, ...]:
    """What the resolver says of these ops at a site; its error names the site."""
    try:
        return runtime.resolver.resolve(ops, runtime.policy.at(site), fixed=fixed, fed=fed)
    except HalError as error:
        raise type(error)(f"{site}: {error}") if not isinstance(error, UnknownName) else error from None


def _story(choice: Choice, whole: Choice) -> str:
    if choice is whole or not whole.fell_back:
        return whole.fell_back
    return f"{whole.op.title()}, which it is a part of: {whole.fell_back}"
