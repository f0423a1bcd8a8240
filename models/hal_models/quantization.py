"""Which scheme each module of a checkpoint has, and under which names its files hold the parts."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hal.errors import UnknownName
from hal.formats import SCHEMES, Scheme

# files write one module under any of these; rules are compared without them
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
STARTS = ("layers.", "mtp.")


def bare(module: str) -> str:
    """A module's name without what stands before the text model: ``layers.0.linear_attn.in_proj_z``, ``lm_head``."""
    return next((module.removeprefix(p) for p in PREFIXES if module.startswith(p)), module)


@dataclass(frozen=True)
class Rule:
    """Modules that a pattern names, and their scheme; nothing: they are not quantized.

    ``re:`` begins a regular expression, matched from the start; ``*`` and ``?`` make a glob; other
    text names whole components, so that ``mlp.gate`` is the router and not ``mlp.gate_proj``: from the
    start where it begins there (``layers.0.mlp`` is not one of the draft head's), else anywhere.
    """

    pattern: str
    scheme: Scheme | None = None

    def names(self, module: str) -> bool:
        """Whether the pattern names a bare module, under any prefix."""
        if self._compiled is not None:
            return any(self._compiled.match(prefix + module) for prefix in ("", *PREFIXES))
        if self.start:
            return f"{module}.".startswith(f"{self.start}.")
        return f".{self.pattern}." in f".{module}."

    @cached_property
    def start(self) -> str:
        """Whole components that names begin with, where the pattern is such; else empty."""
        pattern = bare(self.pattern)
        begins = pattern != self.pattern or pattern.startswith(STARTS)
        return pattern if begins and self._compiled is None else ""

    @cached_property
    def _compiled(self) -> re.Pattern[str] | None:
        if self.pattern.startswith("re:"):
            return re.compile(self.pattern[3:])
        return re.compile(fnmatch.translate(self.pattern)) if any(c in self.pattern for c in "*?[") else None


# what no recipe quantizes unless it is named: ends, routers, b and a, the draft head, the vision tower
PLAIN = ("lm_head", "mlp.gate", "shared_expert_gate", "in_proj_b", "in_proj_a", "mtp.fc", "mtp", "visual")


class Mix(NamedTuple):
    """Recipes of several schemes: of the mixers, of all else, and what of ``PLAIN`` is quantized all the same."""

    mixers: str
    others: str
    also: tuple[str, ...] = ()


MIXERS = ("*linear_attn.*", "*self_attn.*")
MIXES = {
    "mxfp4+fp8": Mix("fp8_channel", "mxfp4"),
    "mxfp4+fp8_all": Mix("fp8_channel", "mxfp4", ("in_proj_b", "in_proj_a")),
    "nvfp4+fp8": Mix("fp8_tensor", "nvfp4", ("lm_head",)),
}


def recipe(name: str, also: Sequence[str] = (), exclude: Sequence[str] = ()) -> tuple[Rule, ...]:
    """The rules of a scheme's or a mix's name for a whole model; ``also``: patterns of ``PLAIN`` to quantize too."""
    if name not in (known := {**SCHEMES, **MIXES}):
        raise UnknownName("scheme", name, known)
    for pattern in also:
        if pattern not in PLAIN:
            raise UnknownName("pattern that is left out", pattern, PLAIN)
    mix = MIXES.get(name, Mix("", name))
    plain = [*exclude, *(pattern for pattern in PLAIN if pattern not in (*also, *mix.also))]
    mixers = [Rule(pattern, SCHEMES[mix.mixers]) for pattern in MIXERS] if mix.mixers else []
    return (*map(Rule, plain), *mixers, Rule("*", SCHEMES[mix.others]))


@dataclass(frozen=True)
class Names:
    """Tensors of one quantized module, after its dot.

    ``within``: of weights whose scales lie under a global one, that one; ``divides``: it and that of the input divide.
    """

    weight: str = "weight"
    scale: str = "weight_scale"
    input_scale: str = "input_scale"
    within: str = "weight_scale_2"
    divides: bool = False


@dataclass(frozen=True)
class Quantization:
    """The rules of a checkpoint, the first that names a module holds; what none names is not quantized.

    ``kv_cache``: what the checkpoint would have keys and values stored in, empty where it says nothing.
    ``apart``: modules of one input whose fixed scales differ, each with the number of its scale.
    ``names``: of all modules, but ``within`` of those with global scales, where the dialect names them otherwise.
    """

    dialect: str
    rules: tuple[Rule, ...]
    kv_cache: str = ""
    names: Names = Names()
    within: Names | None = None
    apart: tuple[tuple[str, int], ...] = ()

    def inputs(self, module: str) -> int:
        """Which of the fixed scales of one input a module's is, where those of its projections differ."""
        return dict(self.apart).get(bare(module), 0)

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of a module, by any of its names."""
        name = bare(module)
        if name not in self._found:  # of all experts of all layers
            parts = name.split(".")
            whole = [".".join(parts[: n + 1]) for n in range(len(parts))]
            first = min((self._places[w] for w in whole if w in self._places), default=len(self.rules))
            others = (at for at in self._others if at < first and self.rules[at].names(name))
            at = next(others, first)
            self._found[name] = self.rules[at].scheme if at < len(self.rules) else None
        return self._found[name]

    @cached_property
    def _found(self) -> dict[str, Scheme | None]:
        return {}

    @cached_property
    def _places(self) -> dict[str, int]:
        """Of rules that are the start of names their places: a list of all modules has one for each expert."""
        found: dict[str, int] = {}
        for at, rule in enumerate(self.rules):
            if rule.start:
                found.setdefault(rule.start, at)
        return found

    @cached_property
    def _others(self) -> list[int]:
        return [at for at, rule in enumerate(self.rules) if not rule.start]

    def changed(self, change: Callable[[Scheme | None], Scheme | None]) -> Quantization:
        """The same with each scheme replaced by what ``change`` makes of it."""
        return replace(self, rules=tuple(replace(rule, scheme=change(rule.scheme)) for rule in self.rules))

    def named(self, scheme: Scheme) -> Names:
        """How files name the tensors of a module of this scheme."""
        return self.within if self.within and scheme.weight.scale.within else self.names
