"""How producers write quantized checkpoints: their configurations as rules, and rules as their configurations.

What a reader does not know is an error: a guess would load and be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hal.errors import CheckpointError, UnknownName
from hal_models.dialects import compressed, fp8, modelopt, quark
from hal_models.dialects.shared import Config
from hal_models.quantization import Quantization, Rule

READERS: dict[str, Callable[[str, Config], Quantization]] = {
    "fp8": fp8.read,
    "modelopt": modelopt.read,
    "compressed-tensors": compressed.read,
    "quark": quark.read,
}
WRITERS: dict[str, Callable[[Sequence[Rule], list[str]], dict[str, Any]]] = {
    "fp8": fp8.write,
    "modelopt": modelopt.write,
    "compressed-tensors": compressed.write,
    "quark": quark.write,
}
BY_MODULE = ("modelopt",)  # write each module of a mix


def read(name: str, config: Config) -> Quantization:
    """The rules of a ``quantization_config``. Errors: CheckpointError naming what is not understood."""
    name = f"{name}: quantization_config"
    method = config.get("quant_method") or ("modelopt" if "quantization" in config else None)
    if method not in READERS:
        raise CheckpointError(f"{name}: quant_method: expected one of {', '.join(sorted(READERS))}, got {method!r}")
    found = READERS[method](name, config)
    for rule in found.rules:
        try:
            rule.names("")
        except re.error as error:
            raise CheckpointError(f"{name}: {rule.pattern!r} is no regular expression: {error}") from None
    return found


def written(dialect: str, rules: Sequence[Rule], unquantized: Sequence[str]) -> dict[str, Any]:
    """A ``quantization_config``: each rule's pattern to its scheme, and the modules that are not quantized.

    Errors: UnknownName for a dialect that is not written, CheckpointError for what it cannot say.
    """
    if dialect not in WRITERS:
        raise UnknownName("dialect", dialect, WRITERS)
    return WRITERS[dialect]([rule for rule in rules if rule.scheme], list(unquantized))
