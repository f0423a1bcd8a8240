"""Which kernel serves an op: one pure function of op, device, policy and registry.

Nothing here is timed, imported from a vendor or read from the environment. Every kernel
is judged and kept with its reason; what can be had is ranked; ops that share memory are
resolved together, under each layout that any of their kernels offers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hal.backend import said
from hal.choice import Candidate, Choice, Piece, rows_text
from hal.device import Device
from hal.errors import HalError, PolicyError, UnresolvedError
from hal.formats import Format, Made, Quantized, Scheme
from hal.judged import AnyOp, Judged, Key, candidate, cover, runs
from hal.kernel import ALL_ROWS, TIERS, Kernel, Part
from hal.layout import Layout, default_layout
from hal.policy import Rules
from hal.registry import Registry
from hal.requirement import Reason

Layouts = Mapping[str, Layout]
MADE_SHOWN = 4  # formats of a kernel that a reason lists


@dataclass(frozen=True)
class _Ask:
    """Everything an answer depends on besides the ops: also the key of the resolver's memory."""

    rules: Rules
    fixed: frozenset[tuple[str, Layout]] = frozenset()
    fed: bool = False
    ideal: bool = False  # all software needs taken as met
    inside: frozenset[tuple[str, str]] = frozenset()  # composed kernels around


class Resolver:
    """Resolves groups of ops on one device with one registry; remembers what it answered."""

    def __init__(self, registry: Registry, device: Device) -> None:
        self.registry = registry
        self.device = device
        self._memory: dict[tuple[tuple[AnyOp, ...], _Ask], tuple[Choice, ...] | HalError] = {}
        # what a kernel says of an op, whatever else was asked
        self._refusals: dict[tuple[str, AnyOp, bool], Reason | None] = {}
        self._declared: dict[tuple[str, AnyOp], Mapping[str, Part]] = {}

    def resolve(
        self,
        ops: Sequence[AnyOp],
        rules: Rules | None = None,
        *,
        fixed: Layouts | None = None,
        fed: bool = False,
    ) -> tuple[Choice, ...]:
        """A Choice for each op of a group that shares memory; the first op leads.

        ``fixed``: layouts decided already, by memory. ``fed``: the input's format is open, a
        producer will be resolved to it. Raises UnresolvedError where nothing serves an op,
        PolicyError where a force cannot be met; both end with the reason of every kernel.
        """
        ask = _Ask(rules or Rules(), frozenset((fixed or {}).items()), fed)
        found = self._remembered(tuple(ops), ask)
        try:
            ideal = self._remembered(tuple(ops), replace(ask, ideal=True))
        except HalError:
            return found
        return tuple(self._with_fallback(have, best) for have, best in zip(found, ideal, strict=True))

    def why_not(self, op: AnyOp, kernel: str, rows: int, rules: Rules | None = None) -> str:
        """Why a kernel does not serve so many rows of an op by itself: what stands in its own way, then in the choice.

        Nothing where it does. Raises what ``resolve`` raises.
        """
        rules = rules or Rules()
        own = next(j.reason for j in self._apart(op, _Ask(rules)) if j.kernel.name == kernel)
        return str(own) if own else self.resolve((op,), rules)[0].why_not(kernel, rows)

    def _with_fallback(self, have: Choice, best: Choice) -> Choice:
        """What runs, with what would run if all software were there and what is missing for it."""
        if have.shape() == best.shape():
            return have
        missing = []
        names = {piece.kernel.name for piece in have.pieces}
        refused = {c.kernel: c.reason for c in have.candidates}
        for piece in best.pieces:
            if piece.kernel.name not in names:
                # the layout that was chosen without it may stand in its way too
                reason = self._software(piece.kernel, best.op) or refused.get(piece.kernel.name, "")
                missing.append(f"rows {rows_text(piece.rows)}: {piece.kernel.name} ({reason})")
        if not missing:
            moved = [f"{n} {best.layouts[n]}" for n in have.layouts if have.layouts[n] != best.layouts[n]]
            missing.append("the same kernels" + (f" on {', '.join(moved)}" if moved else " with other parts"))
        return replace(have, fell_back="with all software met would run " + "; ".join(missing))

    def _remembered(self, ops: tuple[AnyOp, ...], ask: _Ask) -> tuple[Choice, ...]:
        key = (ops, ask)
        if key not in self._memory:
            try:
                self._memory[key] = self._group(ops, ask)
            except (UnresolvedError, PolicyError) as error:
                self._memory[key] = error
        answer = self._memory[key]
        if isinstance(answer, HalError):
            raise answer
        return answer

    def _group(self, ops: tuple[AnyOp, ...], ask: _Ask) -> tuple[Choice, ...]:
        """The best outcome over all layouts, and where the input's format is open, over formats."""
        offered = self._offered(ops, ask)
        best: tuple[Key, tuple[Choice, ...]] | None = None
        for formed in self._formed(ops, ask):
            for layouts in (dict(zip(offered, row, strict=True)) for row in product(*offered.values())):
                try:
                    found = [self._one(op, _of(op, layouts), ask) for op in formed]
                except _Uncovered:
                    continue
                score = (sum(unmet for _, _, unmet in found), [key for _, key, _ in found])
                if best is None or score < best[0]:
                    best = (score, tuple(choice for choice, _, _ in found))
        if best is None:
            raise UnresolvedError(self._refusal(ops, ask))
        if best[0][0]:
            self._unmet(best[1], ask)
        return best[1]

    def _formed(self, ops: tuple[AnyOp, ...], ask: _Ask) -> Iterator[tuple[AnyOp, ...]]:
        if not ask.fed:
            yield ops
            return
        (op,) = ops
        formats: dict[Format, None] = {}
        for kernel in self._by_tier(op):
            formats |= dict.fromkeys(kernel.takes(op))
        wanted = _rounded(op, ask)
        for form in (form for form in formats if wanted in (None, form)):
            yield (replace(op, x=form),)  # type: ignore[call-arg]

    def _by_tier(self, op: AnyOp) -> list[Kernel[Any]]:
        return sorted(self.registry.kernels(type(op)), key=lambda k: (TIERS.index(k.tier), k.name))

    def _offered(self, ops: tuple[AnyOp, ...], ask: _Ask) -> dict[str, list[Layout]]:
        """For each memory of the group the layouts to try, the better kernels' first."""
        fixed = dict(ask.fixed)
        found: dict[str, list[Layout]] = {}
        for op in ops:
            wanted = self._wanted(op, ask)
            for name, memory in op.memories().items():
                if name in fixed:
                    found[name] = [fixed[name]]
                    continue
                layouts = found.setdefault(name, [])
                layouts += [w for w in wanted.get(name, ()) if w not in layouts]
                if not layouts:
                    layouts.append(default_layout(memory))
        return found

    def _wanted(self, op: AnyOp, ask: _Ask) -> dict[str, list[Layout]]:
        """What the kernels of an op, and of their parts, can read; kernels refused anyway left out."""
        found: dict[str, list[Layout]] = {}
        for kernel in self._by_tier(op):
            if self._early(kernel, op, ask) or (not ask.ideal and self._software(kernel, op)):
                continue
            for name, layouts in kernel.reads(op, self.device).items():
                found.setdefault(name, []).extend(layouts)
            parts = self._parts_of(kernel, op)
            for key, part in parts.items():
                inner = replace(ask, fed=key in _fed(parts), inside=ask.inside | {(op.title(), kernel.name)})
                for name, layouts_ in self._wanted(part.op, inner).items():
                    found.setdefault(part.outer(name), []).extend(layouts_)
        return found

    def _one(self, op: AnyOp, layouts: dict[str, Layout], ask: _Ask) -> tuple[Choice, Key, int]:
        """Choice, rank and number of unmet forces of one op under given layouts."""
        judged = [self._judge(kernel, op, layouts, ask) for kernel in self.registry.kernels(type(op))]
        chosen = list(cover(judged))
        if not chosen:
            raise _Uncovered
        pieces = tuple(
            replace(j.piece, rows=rows, why=self._why(j, judged, op, ask)) for rows, j in chosen if j.piece is not None
        )
        keys = sorted(j.key for _, j in chosen)
        forced = self._forced(op, ask)
        met = any(j.piece is not None and runs(j.piece, op, forced) for _, j in chosen)
        candidates = tuple(candidate(j, chosen) for j in judged)
        broken = tuple(
            Candidate(f"backend {b.name}", ALL_ROWS, "refused", "software", f"needs its import; {b.error}")
            for b in self.registry.broken
        )
        return (
            Choice(op, layouts, pieces, candidates + broken),
            (keys[0], keys),
            int(forced is not None and not met),
        )

    def _judge(self, kernel: Kernel[Any], op: AnyOp, layouts: dict[str, Layout], ask: _Ask) -> Judged:
        """Every condition in order; software last, so that it is named only where it alone stands in the way."""
        try:
            return self._judged(kernel, op, layouts, ask)
        except HalError:
            raise
        except Exception as error:
            raise HalError(f"{kernel.name}: its declaration failed at {op.title()}: {said(error)}") from error

    def _judged(self, kernel: Kernel[Any], op: AnyOp, layouts: dict[str, Layout], ask: _Ask) -> Judged:
        rows = ALL_ROWS
        reason = self._early(kernel, op, ask)
        parts: dict[str, Choice] = {}
        if not reason:
            rows = least, most = kernel.rows(op, self.device)
            if most is not None and most < least:
                reason = Reason("op", f"takes no rows: at least {least} (needed), at most {most} (taken)")
        if not reason:
            form = getattr(op, "x", None)
            if ask.fed and form not in kernel.takes(op):
                reason = _edge("x", kernel.takes(op), form)
        if not reason:
            reason = self._layout(kernel, op, layouts)
        if not reason:
            try:
                parts = self._parts(kernel, op, layouts, ask)
            except _Missing as missing:
                reason = missing.reason
        piece = Piece(rows, kernel, kernel.settings(op, self.device), "", parts) if not reason else None
        if piece and piece.numerics(op).kind > ask.rules.numerics:
            reason = Reason(
                "numerics",
                f"is {piece.numerics(op).kind.name}; the policy allows {ask.rules.numerics.name} at most",
            )
        if not reason and not ask.ideal:
            reason = self._software(kernel, op)
        if reason or piece is None:
            return Judged(kernel, rows, reason)
        return Judged(kernel, rows, None, piece, self._key(kernel, op, piece, ask))

    def _early(self, kernel: Kernel[Any], op: AnyOp, ask: _Ask) -> Reason | None:
        """Conditions that hold under any layout, software left out."""
        if (op.title(), kernel.name) in ask.inside:
            return Reason("op", "is composed of this op; it cannot be a part of itself")
        if ask.rules.denied(op.title(), kernel.name):
            return Reason("policy", "denied by the policy")
        key = (kernel.name, op, ask.fed)
        if key not in self._refusals:
            self._refusals[key] = self._own_refusal(kernel, op, ask.fed)
        if reason := self._refusals[key]:
            return reason
        if (wanted := _rounded(op, ask)) and wanted not in kernel.takes(op):
            return Reason("policy", f"takes {_shown(kernel.takes(op))}; the policy wants the checkpoint's {wanted}")
        return None

    def _own_refusal(self, kernel: Kernel[Any], op: AnyOp, fed: bool) -> Reason | None:
        for need in kernel.needs:
            if need.kind != "software" and (reason := need(self.device)) and reason.kind != "software":
                return reason
        if (schemes := op.schemes()) and not kernel.quantized:
            return Reason("op", f"reads weights in {op.dtype}; they are {', '.join(map(str, schemes))}")  # type: ignore[attr-defined]
        reason = kernel.refuses(op, self.device)
        if reason and reason.kind != "software":
            return reason
        for side, formats in (("x", kernel.takes), ("out", kernel.makes)):
            form = getattr(op, side, None)
            if form is not None and not (side == "x" and fed) and form not in formats(op):
                return _edge(side, formats(op), form)
        return None

    def _parts_of(self, kernel: Kernel[Any], op: AnyOp) -> Mapping[str, Part]:
        key = (kernel.name, op)
        if key not in self._declared:
            self._declared[key] = kernel.parts(op)
        return self._declared[key]

    def _software(self, kernel: Kernel[Any], op: AnyOp) -> Reason | None:
        for need in kernel.needs:
            if (reason := need(self.device)) and reason.kind == "software":
                return reason
        reason = kernel.refuses(op, self.device)
        return reason if reason and reason.kind == "software" else None

    def _layout(self, kernel: Kernel[Any], op: AnyOp, layouts: dict[str, Layout]) -> Reason | None:
        reads = kernel.reads(op, self.device)
        through_parts = {part.outer(m) for part in self._parts_of(kernel, op).values() for m in part.op.memories()}
        for name, memory in op.memories().items():
            if name not in reads and name in through_parts:
                continue
            wanted = reads.get(name, (default_layout(memory),))
            if not any(layouts[name].reads_as(w) for w in wanted):
                able = " or ".join(map(str, wanted))
                return Reason("layout", f"reads {name} as {able}; it lies {layouts[name]}")
        return None

    def _parts(self, kernel: Kernel[Any], op: AnyOp, layouts: dict[str, Layout], ask: _Ask) -> dict[str, Choice]:
        """Choices of the parts, consumers before the producers that feed them."""
        parts = dict(self._parts_of(kernel, op))
        fed = _fed(parts)
        done: dict[str, Choice] = {}
        for name, part in reversed(parts.items()):
            inner = part.op
            if part.feeds:
                forms = [done[n].op.x if isinstance(n, str) else n for n in part.feeds]  # type: ignore[attr-defined]
                inner = replace(inner, out=agreed(forms))  # type: ignore[call-arg]
            asked = replace(
                ask,
                fixed=frozenset((m, layouts[part.outer(m)]) for m in inner.memories()),
                fed=name in fed,
                inside=ask.inside | {(op.title(), kernel.name)},
            )
            try:
                (done[name],) = self._remembered((inner,), asked)
            except HalError as error:
                raise _Missing(self._part_reason(name, inner, asked, error)) from None
        return {name: done[name] for name in parts}

    def _part_reason(self, name: str, op: AnyOp, ask: _Ask, error: HalError) -> Reason:
        if isinstance(error, PolicyError):
            return Reason("policy", f"part {name}: {error}")
        judged = self._apart(op, ask)
        listed = "; ".join(f"{j.kernel.name}: {j.reason}" for j in judged) or "none is registered"
        software = any(j.reason and j.reason.kind == "software" for j in judged)
        return Reason("software" if software else "op", f"needs a kernel for its part {name} ({op.title()}); {listed}")

    def _key(self, kernel: Kernel[Any], op: AnyOp, piece: Piece, ask: _Ask) -> Key:
        """Least wins: forced, preferred, tier, own tier, format of the input, launches, name."""
        preferred = ask.rules.preferred(op.title())
        takes = kernel.takes(op)
        return (
            not runs(piece, op, self._forced(op, ask)),
            preferred.index(kernel.name) if kernel.name in preferred else len(preferred),
            TIERS.index(piece.tier),
            # a composed kernel does nothing itself
            len(TIERS) if kernel.tier == "composed" else TIERS.index(kernel.tier),
            takes.index(op.x) if ask.fed and hasattr(op, "x") else 0,
            piece.launches,
            kernel.name,
        )

    def _forced(self, op: AnyOp, ask: _Ask) -> str | None:
        """The kernel that must serve this op; inside that kernel the force is met already."""
        forced = ask.rules.forced(op.title(), self.registry.names(type(op)))
        return None if (op.title(), forced) in ask.inside else forced

    def _why(self, judged: Judged, all_: Sequence[Judged], op: AnyOp, ask: _Ask) -> str:
        name, piece = judged.kernel.name, judged.piece
        if piece and runs(piece, op, self._forced(op, ask)):
            return "forced by the policy"
        if name in ask.rules.preferred(op.title()):
            return "preferred by the policy"
        if sum(j.reason is None for j in all_) == 1:
            return "the only one eligible"
        return f"ranked first for these rows: tier {piece.tier}, {piece.launches} launches" if piece else ""

    def _apart(self, op: AnyOp, ask: _Ask) -> list[Judged]:
        """Each kernel judged under layouts that it reads itself: what stands in its way, group aside."""
        found = []
        for kernel in self.registry.kernels(type(op)):
            if ask.fed and (able := kernel.takes(op)):
                op = replace(op, x=able[0])  # type: ignore[call-arg]
            own = {name: default_layout(memory) for name, memory in op.memories().items()}
            own |= {name: layouts[0] for name, layouts in kernel.reads(op, self.device).items()}
            found.append(self._judge(kernel, op, {**own, **{n: v for n, v in ask.fixed if n in own}}, ask))
        return found

    def _refusal(self, ops: tuple[AnyOp, ...], ask: _Ask) -> str:
        lines = []
        for op in ops:
            judged = self._apart(op, ask)
            covered = bool(list(cover(judged)))
            lines.append(
                f"no kernel for {op} on {self.device.label}" if not covered else f"{op.title()}, of its group:"
            )
            if not judged:
                lines.append("  none is registered")
            for j in judged:
                lines.append(f"  {j.kernel.name} (rows {rows_text(j.rows)}): {j.reason or 'would serve these rows'}")
        lines += [f"  backend {b.name}: {b.error}" for b in self.registry.broken]
        return "\n".join(lines)

    def _unmet(self, choices: tuple[Choice, ...], ask: _Ask) -> None:
        for choice in choices:
            forced = self._forced(choice.op, ask)
            if forced is None or any(runs(piece, choice.op, forced) for piece in choice.pieces):
                continue
            judged = {j.kernel.name: j.reason for j in self._apart(choice.op, ask)}
            listed = "\n".join(f"  {n}: {r or 'eligible'}" for n, r in judged.items())
            why = judged[forced] or "the ops that share its memory have no kernel for a layout it reads"
            raise PolicyError(
                f"{choice.op.title()}: {forced} is forced and cannot be had on {self.device.label}: {why}\n{listed}"
            )


class _Uncovered(Exception):  # noqa: N818 - a signal, not an error
    """Some rows have no kernel under these layouts."""


class _Missing(Exception):  # noqa: N818 - a signal, not an error
    def __init__(self, reason: Reason) -> None:
        self.reason = reason


def _rounded(op: AnyOp, ask: _Ask) -> Format | None:
    """What a fed input must be rounded to, where the policy wants it as the checkpoint says."""
    scheme: Scheme | None = getattr(op, "scheme", None)
    return scheme.activations if ask.fed and ask.rules.activations == "checkpoint" and scheme else None


def _edge(side: str, able: Sequence[Made], form: Made | None) -> Reason:
    return Reason("edge", f"{'takes' if side == 'x' else 'makes'} {_shown(able)}; the edge is {_made(form)}")


def _shown(able: Sequence[Made]) -> str:
    shown = " or ".join(map(_made, able[:MADE_SHOWN])) or "nothing"
    more = len(able) - MADE_SHOWN
    return f"{shown} or {more} more" if more > 0 else shown


def _made(form: Made | None) -> str:
    return " and ".join(map(str, form)) if isinstance(form, tuple) else str(form)


def _fed(parts: Mapping[str, Part]) -> set[str]:
    """Names of the parts that others feed."""
    return {into for part in parts.values() for into in part.feeds if isinstance(into, str)}


def agreed(forms: Sequence[Format]) -> Made:
    """What a producer makes for consumers: one format for all, or one for each. Static scales are each one's own."""
    own = any(isinstance(form, Quantized) and form.scale.fixed for form in forms)
    return forms[0] if len(forms) == 1 or (len(set(forms)) == 1 and not own) else tuple(forms)


def _of(op: AnyOp, layouts: Layouts) -> dict[str, Layout]:
    return {name: layouts[name] for name in op.memories()}
