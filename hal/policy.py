"""What the user allows: forced, preferred and denied kernels, the loosest numerics, strictness.

From the environment and from one TOML file that ``HAL_POLICY`` names (the environment wins)::

    HAL_FORCE="Linear=torch.linear,InProj@layers.2.*=torch.separate"   an unmet force is an error
    HAL_PREFER="GatedDeltaDecode=composed.gated_delta"                 taken where it can be had
    HAL_DENY="torch.decode"  or  "Op=kernel", "Op@glob=kernel"         never taken
    HAL_NUMERICS=exact|reassociated|lossy                              the loosest allowed
    HAL_STRICT=1                                                       a fallback is an error
    HAL_CHECK=1                                                        every call checks its arguments
    HAL_ACTIVATIONS=device|checkpoint                                  round inputs of 4-bit weights: where the
                                                                       device multiplies 4 bits, or everywhere
    HAL_INPUT_SCALES=own|maximum                                       projections of one input whose fixed scales
                                                                       differ: a product each, or the largest
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.errors import PolicyError, UnknownName
from hal.numerics import Class
from hal.ops import OPS, op_class

if TYPE_CHECKING:
    from hal.registry import Registry

VARIABLES = {
    "HAL_POLICY": "a TOML file with the same settings in lower case",
    "HAL_FORCE": "kernels that must run: Op=kernel, Op@site-glob=kernel",
    "HAL_PREFER": "kernels to take where they can be had",
    "HAL_DENY": "kernels never to take: kernel, Op=kernel, Op@site-glob=kernel",
    "HAL_NUMERICS": "the loosest numerics allowed: exact, reassociated, lossy",
    "HAL_STRICT": "1: a fallback is an error",
    "HAL_CHECK": "1: every call checks its arguments",
    "HAL_ACTIVATIONS": "inputs of 4-bit weights rounded as the checkpoint says: device (where it multiplies 4 bits), "
    "checkpoint (everywhere)",
    "HAL_INPUT_SCALES": "fixed scales of one input that differ: own (a product for each), maximum (the largest)",
}
WORDS = {"activations": ("device", "checkpoint"), "input_scales": ("own", "maximum")}


@dataclass(frozen=True)
class Rule:
    """One wish: a kernel, for an op (``*``: any), at sites that match the glob."""

    kernel: str
    op: str = "*"
    site: str = "*"

    @classmethod
    def parse(cls, text: str, *, bare: bool) -> Rule:
        """From ``Op=kernel``, ``Op@glob=kernel`` or, where ``bare``, ``kernel`` alone."""
        target, equals, kernel = (piece.strip() for piece in text.rpartition("="))
        if not kernel or (not equals and not bare) or (equals and not target):
            raise PolicyError(f"a rule is Op=kernel or Op@site=kernel, got {text!r}")
        op, _, site = target.partition("@")
        if op and op != "*":
            op_class(op)
        return cls(kernel, op or "*", site or "*")

    def binds(self, op: str, site: str) -> bool:
        """Whether it speaks of this op at this site."""
        return self.op in ("*", op) and self.at(site)

    def at(self, site: str) -> bool:
        """Whether its glob names a site, or a member or a part of what is bound there."""
        steps = self.site.split(".")
        ends = [n for n in range(3) if n < len(steps) and not any(c in "".join(steps[len(steps) - n :]) for c in "*?[")]
        return any(fnmatchcase(site, ".".join(steps[: len(steps) - n])) for n in ends)

    def width(self) -> tuple[int, bool]:
        """Least for the narrowest: most characters of the site given, then an op named."""
        return -len(self.site.replace("*", "").replace("?", "")), self.op == "*"

    def __str__(self) -> str:
        site = "" if self.site == "*" else f"@{self.site}"
        return f"{self.op}{site}={self.kernel}"


@dataclass(frozen=True)
class Rules:
    """The policy at one site: what the resolver reads, and what its memory is keyed by."""

    force: tuple[tuple[str, str], ...] = ()
    prefer: tuple[tuple[str, str], ...] = ()
    deny: frozenset[tuple[str, str]] = frozenset()
    numerics: Class = Class.REASSOCIATED
    activations: str = "device"

    @staticmethod
    def _find(pairs: Iterable[tuple[str, str]], op: str) -> list[str]:
        return [kernel for name, kernel in pairs if name in ("*", op)]

    def forced(self, op: str, kernels: Iterable[str]) -> str | None:
        """The one of an op's kernels that must serve it."""
        return next((kernel for kernel in self._find(self.force, op) if kernel in kernels), None)

    def preferred(self, op: str) -> list[str]:
        """Kernels to take first, in order."""
        return self._find(self.prefer, op)

    def denied(self, op: str, kernel: str) -> bool:
        """Whether a kernel must not serve this op."""
        return (op, kernel) in self.deny or ("*", kernel) in self.deny


@dataclass(frozen=True)
class Policy:
    """All wishes together."""

    force: tuple[Rule, ...] = ()
    prefer: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    numerics: Class = Class.REASSOCIATED
    strict: bool = False
    check: bool = False
    activations: str = "device"
    input_scales: str = "own"
    source: str = field(default="default", compare=False)

    @classmethod
    def of(
        cls,
        *,
        force: Iterable[str] = (),
        prefer: Iterable[str] = (),
        deny: Iterable[str] = (),
        numerics: str = "reassociated",
        strict: bool = False,
        check: bool = False,
        activations: str = "device",
        input_scales: str = "own",
        source: str = "given",
    ) -> Policy:
        """A policy from rules as text, as they stand in ``HAL_*``."""
        for name, word in (("activations", activations), ("input_scales", input_scales)):
            if word not in WORDS[name]:
                raise UnknownName(name, word, WORDS[name])
        classes = {c.name.lower(): c for c in Class}
        if numerics.lower() not in classes:
            raise UnknownName("numerics", numerics, classes)
        forced = tuple(Rule.parse(t, bare=False) for t in force)
        for rule in forced:
            if other := [r for r in forced if (r.op, r.site) == (rule.op, rule.site) and r.kernel != rule.kernel]:
                raise PolicyError(f"two forces contradict each other: {rule} and {other[0]}")
        return cls(
            forced,
            tuple(Rule.parse(t, bare=False) for t in prefer),
            tuple(Rule.parse(t, bare=True) for t in deny),
            classes[numerics.lower()],
            strict,
            check,
            activations,
            input_scales,
            source,
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Policy:
        """The policy of ``HAL_*`` and of the file that ``HAL_POLICY`` names."""
        environ = os.environ if environ is None else environ
        for name in environ:
            if name.startswith("HAL_") and name not in VARIABLES:
                raise UnknownName("environment variable", name, VARIABLES)
        settings: dict[str, Any] = {}
        if path := environ.get("HAL_POLICY"):
            settings |= _read(Path(path))
        for key in ("force", "prefer", "deny"):
            if text := environ.get(f"HAL_{key.upper()}"):
                settings[key] = [piece for piece in text.split(",") if piece.strip()]
        for key in ("numerics", *WORDS):
            if text := environ.get(f"HAL_{key.upper()}"):
                settings[key] = text
        for key in ("strict", "check"):
            if text := environ.get(f"HAL_{key.upper()}"):
                settings[key] = _flag(f"HAL_{key.upper()}", text)
        return cls.of(**settings, source="HAL_*" if settings else "default")

    def at(self, site: str) -> Rules:
        """What holds at one site; a rule for a narrower glob stands before a wider one."""

        def pairs(rules: tuple[Rule, ...]) -> tuple[tuple[str, str], ...]:
            bound = [r for r in rules if r.at(site)]
            return tuple((r.op, r.kernel) for r in sorted(bound, key=Rule.width))

        deny = frozenset(pairs(self.deny))
        return Rules(pairs(self.force), pairs(self.prefer), deny, self.numerics, self.activations)

    def validate(self, registry: Registry) -> None:
        """Raise UnknownName for a kernel that is registered for no op that its rule names."""
        for rule in (*self.force, *self.prefer, *self.deny):
            known = registry.names(None if rule.op == "*" else OPS[rule.op])
            if rule.kernel not in known:
                what = "kernel" if rule.op == "*" else f"kernel of {rule.op}"
                raise UnknownName(what, rule.kernel, known)


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise PolicyError(f"{name} is 0 or 1, got {text!r}")
    return text == "1"


def _read(path: Path) -> dict[str, Any]:
    kinds = {"force": list, "prefer": list, "deny": list, "numerics": str, "strict": bool, "check": bool}
    kinds |= dict.fromkeys(WORDS, str)
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"HAL_POLICY: {path} cannot be read: {error}") from None
    for key, value in settings.items():
        if key not in kinds:
            raise UnknownName(f"setting in {path}", key, kinds)
        if not isinstance(value, kinds[key]):
            raise PolicyError(f"{path}: {key} is a {kinds[key].__name__}, got {value!r}")
        if isinstance(value, list) and not all(isinstance(rule, str) for rule in value):
            raise PolicyError(f"{path}: {key} is a list of rules as text, got {value!r}")
    return settings
