"""Binds ops to kernels: resolve, allocate storages, load, remember; one device, one policy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hal.backend import load_target, said
from hal.binding import Bound, Group, alike, by_rows, checked, finish, not_loaded, sound
from hal.choice import Choice, Piece
from hal.comm import Comm, agree
from hal.errors import BindError, HalError, PolicyError
from hal.formats import Scheme, dtype
from hal.kernel import Site
from hal.layout import ParamLayout, State
from hal.ops.base import Op
from hal.policy import Policy
from hal.registry import Registry
from hal.requirement import feature
from hal.resolving import Resolver

if TYPE_CHECKING:
    from hal.batch import Batch
    from hal.device import Device
    from hal.storage import Storage

P = ParamSpec("P")
R = TypeVar("R")


class Runtime:
    """One device, one policy, one registry.

    ``place`` is where tensors live (``cpu``, ``cuda:0``); ``comm`` joins the ranks of tensor
    parallelism. ``load=False``: resolves and remembers, allocates nothing, needs no torch;
    ``world`` says for how many ranks.
    """

    def __init__(
        self,
        device: Device | None = None,
        policy: Policy | None = None,
        registry: Registry | None = None,
        *,
        load: bool = True,
        place: str | None = None,
        comm: Comm | None = None,
        world: int = 1,
    ) -> None:
        from hal.probing import probe

        self.registry = registry or Registry.installed()
        self.device = device or probe(self.registry.backends, self.registry.broken)
        self.policy = policy or Policy.from_environment()
        self.policy.validate(self.registry)
        self.resolver = Resolver(self.registry, self.device)
        self.load = load
        self.place = place or self._backend_of("place") or "cpu"
        if load and comm is None and world != 1:
            raise BindError(f"{world} ranks need a communicator; only Runtime(load=False) goes without")
        self.comm = comm
        self.world = comm.world if comm else world
        self.groups: list[Group] = []
        self.notes: dict[str, None] = {}  # what a report says beside the choices
        self._plans: dict[str, dict[object, Callable[[Any], object]]] = {}
        self._by_bound: dict[int, Group] = {}

    def fresh(self, policy: Policy | None = None, *, load: bool = True) -> Runtime:
        """One with nothing bound yet, under this policy or another, that remembers what was resolved here."""
        other = Runtime(
            self.device, policy or self.policy, self.registry,
            load=load, place=self.place, comm=self.comm, world=self.world,
        )  # fmt: skip
        other.resolver = self.resolver
        return other

    @property
    def rank(self) -> int:
        return self.comm.rank if self.comm else 0

    def served(self, scheme: Scheme | None) -> Scheme | None:
        """A checkpoint's scheme as this device has it; the report says what differs.

        Inputs in 4 bits stay as they are where the device does not multiply 4 bits, for rounding them would
        gain nothing, unless the policy wants them as the checkpoint says.
        """
        form = scheme.activations if scheme else None
        if scheme is None or form is None or dtype(form.value).bits > 4 or self.policy.activations == "checkpoint":
            return scheme
        if (reason := feature("fp4_e2m1")(self.device)) is None:
            return scheme
        why = f"rounding them to {form.value} {reason}; HAL_ACTIVATIONS=checkpoint rounds them"
        self.notes[f"activations: {scheme} takes them as they are: {why}"] = None
        return replace(scheme, activations=None)

    def bind(
        self,
        op: Op[P, R],
        name: str,
        *,
        fed: bool = False,
        feeds: Bound[..., Any] | None = None,
        shares: Bound[..., Any] | Group | None = None,
        own: Collection[str] = (),
        scales: Mapping[str, Any] | None = None,
    ) -> Bound[P, R]:
        """A callable for one op. ``fed``: its input's format is open; the op bound with ``feeds`` makes it.

        ``shares``: memory of equal name is the other's, in the layout it has, except what is its
        ``own``. ``scales``: static scales by side (``out``) where no op of this runtime holds them.
        """
        group = self._bind(name, {"op": op}, fed=fed, feeds=feeds, shares=shares, own=own, scales=scales)
        bound: Any = group.bounds["op"]
        return bound  # type: ignore[no-any-return]

    def bind_group(
        self,
        *,
        name: str,
        feeds: Bound[..., Any] | None = None,
        shares: Bound[..., Any] | Group | None = None,
        **members: Op[..., Any] | None,
    ) -> Group:
        """Ops that share memory, resolved together; the first leads. ``group.member`` is its callable."""
        present = {key: op for key, op in members.items() if op is not None}
        return self._bind(name, present, feeds=feeds, shares=shares)

    def group_of(self, bound: Bound[..., Any]) -> Group:
        """The group that a callable was bound in."""
        try:
            return self._by_bound[id(bound)]
        except KeyError:
            raise BindError(f"{getattr(bound, 'name', bound)}: was not bound by this runtime") from None

    def _bind(
        self,
        name: str,
        members: dict[str, Op[..., Any]],
        *,
        fed: bool = False,
        feeds: Bound[..., Any] | None = None,
        shares: Bound[..., Any] | Group | None = None,
        own: Collection[str] = (),
        scales: Mapping[str, Any] | None = None,
    ) -> Group:
        for op in members.values():
            if op.world not in (1, self.world):
                raise BindError(f"{name}: {op.title()} is made for world {op.world}, the runtime has {self.world}")
        if any(group.name == name for group in self.groups):
            raise BindError(f"{name}: is bound already")
        consumer = self.group_of(feeds) if feeds is not None else None
        sound(name, members, fed, consumer)
        if consumer is not None:
            form = consumer.choices["op"].op.x  # type: ignore[attr-defined]
            members = {
                key: replace(op, out=form) if hasattr(op, "out") else op  # type: ignore[call-arg]
                for key, op in members.items()
            }
        owner = self.group_of(shares) if isinstance(shares, Bound) else shares
        names = alike(name, members, owner, own)
        fixed = {n: layout for n, layout in (owner.layouts if owner else {}).items() if n in names}
        rules = self.policy.at(name)
        found = self.resolver.resolve(tuple(members.values()), rules, fixed=fixed, fed=fed)
        choices = dict(zip(members, found, strict=True))
        for choice in found:
            if self.policy.strict and choice.fell_back:
                raise PolicyError(
                    f"{name}: {choice.op.title()} fell back under HAL_STRICT=1: {choice.fell_back}; "
                    f"install what is missing, or deny that kernel with HAL_DENY"
                )
        group = Group(name, members, choices, fed, fixed, takes=consumer, runtime=self)
        if self.load:
            self._allocate(group, owner)
        bounds = {key: self._bound(group, key, choice, scales or {}) for key, choice in choices.items()}
        group.bounds.update(bounds)
        group.__dict__.update(bounds)
        if consumer is not None:
            consumer.claimed = True
        for bound in bounds.values():
            self._by_bound[id(bound)] = group
        self.groups.append(group)
        return group

    def _allocate(self, group: Group, owner: Group | None) -> None:
        from hal.storage import Storage

        shared = owner.storages if owner else {}
        for op in group.members.values():
            for name, memory in op.memories().items():
                layout = group.layouts[name]
                if isinstance(memory, State) or name in group.storages:
                    continue
                if name in shared and name in group.fixed:
                    group.storages[name] = shared[name]
                    continue
                assert isinstance(layout, ParamLayout)
                group.storages[name] = Storage(f"{group.name}.{name}", memory, layout, self.place)

    def _bound(self, group: Group, member: str, choice: Choice, scales: Mapping[str, Any]) -> Bound[..., Any]:
        name = group.site(member)
        if not self.load:
            return finish(Bound(partial(not_loaded, name)), name, choice, ())
        if group.takes and "input_scale" in group.takes.storages:
            scales = {**scales, "out": group.takes.storages["input_scale"].read()}
        return self._callable(choice, name, group.storages, scales)

    def _callable(
        self, choice: Choice, name: str, storages: Mapping[str, Storage], scales: Mapping[str, Any]
    ) -> Bound[..., Any]:
        pieces = tuple((piece, self._load(piece, choice, name, storages, scales)) for piece in choice.pieces)
        call: Callable[..., Any] = pieces[0][1] if len(pieces) == 1 else by_rows(choice.op, pieces)
        if self.policy.check:
            call = partial(checked, choice, call)
            pieces = tuple((piece, partial(checked, choice, inner)) for piece, inner in pieces)
        return finish(Bound(call), name, choice, pieces)

    def _load(
        self,
        piece: Piece,
        choice: Choice,
        name: str,
        storages: Mapping[str, Storage],
        scales: Mapping[str, Any],
    ) -> Callable[..., Any]:
        parts: dict[str, Bound[..., Any]] = {}
        declared = piece.kernel.parts(choice.op)
        for key, part in reversed(list(declared.items())):
            inner = {m: storages[part.outer(m)] for m in part.op.memories() if part.outer(m) in storages}
            passed = dict(scales) if hasattr(part.op, "out") else {}
            if (side := part.outer("out")) in scales:
                passed["out"] = scales[side]
            if part.feeds:
                into = [declared[n].outer("input_scale") if isinstance(n, str) else "" for n in part.feeds]
                passed = _static(piece.parts[key].op, into, storages)
            parts[key] = self._callable(piece.parts[key], f"{name}.{key}", inner, passed)
        site = Site(choice.op, name, piece.settings, choice.layouts, storages, parts, scales, self, piece.kernel.name)
        try:
            return piece.kernel.load(site)
        except Exception as error:
            deny = f"HAL_DENY={choice.op.title()}={piece.kernel.name}"
            raise BindError(
                f"{name}: {piece.kernel.name} was chosen and failed to load: {said(error)}; {deny} goes on without it"
            ) from error

    def plan(self, key: tuple[str, Op[..., Any]], plan: Callable[[Any], object]) -> object:
        """Have ``plan(batch)`` run once in each step of the op's mode; equal keys are one plan."""
        self._plans.setdefault(key[1].mode, {}).setdefault(key, plan)
        return key

    def begin(self, batch: Batch) -> Batch:
        """Run the plans of this batch's mode: once a step, outside capture, not per layer."""
        for key, plan in self._plans.get(batch.mode, {}).items():
            batch.plans[key] = plan(batch)
        return batch

    def uncaptured(self, rows: int) -> list[str]:
        """Ops of a decode step of so many rows that no graph may hold, with their kernels."""
        return [
            f"{group.name}.{member}: {piece.kernel.name}"
            for group in self.groups
            for member, choice in group.choices.items()
            if choice.op.mode != "prefill" and not (piece := choice.at(rows)).captures
        ]

    @property
    def can_capture(self) -> bool:
        """Whether a backend captures graphs on this device."""
        return self._capture is not None

    @property
    def _capture(self) -> str | None:
        return self._backend_of("capture")

    def _backend_of(self, what: str) -> str | None:
        """What the backend of the device's vendor says."""
        found = [getattr(b, what) for b in self.registry.backends if b.name == self.device.value("vendor")]
        return next(iter(found), None)

    def capture(self, work: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Record what ``work`` launches: a callable that replays it, and its result at fixed addresses.

        ``work`` must have run before, so that every kernel is compiled. Errors: BindError where
        no backend captures on this device.
        """
        if self._capture is None:
            raise BindError(f"no backend captures graphs on {self.device.label} ({self.device.value('vendor')})")
        captured: tuple[Callable[[], None], R] = load_target(self._capture)(work)
        return captured

    def seal(self) -> None:
        """The loader is done: every storage is filled, every fed op is fed, all ranks chose alike."""
        for group in self.groups:
            if group.fed and not group.claimed:
                form = group.choices["op"].op.x  # type: ignore[attr-defined]
                raise BindError(f"{group.name}: takes {form} and is fed by nothing; bind its producer with feeds=")
        if unbound := self.unbound_forces():
            raise PolicyError("; ".join(unbound))
        missing = [
            f"{storage.name}: {part}"
            for group in self.groups
            for storage in dict.fromkeys(group.storages.values())
            for part in storage.missing()
        ]
        if missing:
            raise HalError("parameters not filled: " + ", ".join(sorted(set(missing))))
        for group in self.groups:
            for storage in group.storages.values():
                storage.seal()
        if self.comm is not None:
            agree(self.comm, self.lines())

    def unbound_forces(self) -> list[str]:
        """Forces that speak of no op at any site bound: each as a sentence."""
        bound = [(group.name, c.op.title()) for group in self.groups for _, c in group.walk()]
        found = []
        for rule in self.policy.force:
            if not any(rule.binds(op, site) for site, op in bound):
                sites = sorted({site for site, op in bound if op == rule.op})
                shown = ", ".join(sites[:4]) + (" ..." if len(sites) > 4 else "")
                near = f"its sites are {shown}" if sites else "the op is not bound"
                found.append(f"{rule} is forced and binds nothing: {near}")
        return found

    def lines(self) -> list[str]:
        """What was chosen, a line for each op; equal on all ranks."""
        return [f"{g.name}.{key}: {choice.shape()}" for g in self.groups for key, choice in g.choices.items()]

    def digest(self) -> str:
        """A short hash of all choices."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()[:16]

    def fallbacks(self) -> list[tuple[str, str]]:
        """Name and story of each op that fell back."""
        return [(g.name, c.fell_back) for g in self.groups for c in g.choices.values() if c.fell_back]

    def report(self) -> str:
        """All choices as text, ops that are alike in one line."""
        from hal.report import report

        return report(self)


def _static(op: Op[..., Any], memories: Sequence[str], storages: Mapping[str, Storage]) -> dict[str, Any]:
    """The static scales of an op's consumers by side: ``out``, or ``out0``, ``out1`` for formats of their own."""
    several = isinstance(getattr(op, "out", None), tuple)
    sides = [f"out{i}" if several else "out" for i in range(len(memories))]
    return {side: storages[m].read() for side, m in zip(sides, memories, strict=True) if m in storages}
