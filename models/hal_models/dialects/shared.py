"""What readers and writers of dialects share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hal.errors import CheckpointError
from hal.formats import Scheme
from hal_models.quantization import Rule

Config = Mapping[str, Any]
EVERYTHING = "*"


def listed(name: str, config: Config, *keys: str) -> list[str]:
    """The strings under the first of the keys that is there. Errors: CheckpointError."""
    found: Any = next((config[key] for key in keys if config.get(key) is not None), [])
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise CheckpointError(f"{name}: {keys[0]}: expected a list of names, got {found!r}")
    return list(found)


def kv_cache(scheme: Any) -> str:
    """What a checkpoint says of keys and values, as text."""
    return "" if not scheme else str(scheme)


def known(forms: Mapping[tuple[Any, ...], Any]) -> str:
    """The forms that are read, for an error."""
    return " or ".join(map(str, forms))


def shown(schemes: Iterable[Scheme | None]) -> str:
    """Schemes, for an error."""
    return ", ".join(sorted(map(str, schemes)))


def by_scheme(rules: Sequence[Rule]) -> Iterator[tuple[Scheme, list[str]]]:
    """Each scheme with the patterns that have it."""
    for scheme in dict.fromkeys(rule.scheme for rule in rules if rule.scheme):
        yield scheme, [rule.pattern for rule in rules if rule.scheme == scheme]


def expression(pattern: str) -> str:
    """A glob, or whole components, as a regular expression that is matched from the start."""
    if "*" in pattern:
        return ".*".join(map(re.escape, pattern.split("*"))) + "$"
    return rf"(.*\.)?{re.escape(pattern)}(\..*)?$"
