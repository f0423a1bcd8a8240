"""``fp8``: Qwen's own, and others of that form. Source: config.json of Qwen's FP8 models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal.errors import CheckpointError
from hal.formats import SCHEMES
from hal_models.dialects.shared import EVERYTHING, Config, known, listed, shown
from hal_models.quantization import Names, Quantization, Rule

SCHEME_OF: dict[tuple[Any, ...], str] = {("dynamic", (128, 128)): "fp8_block", ("static", ()): "fp8_tensor"}


def read(name: str, config: Config) -> Quantization:
    """``modules_to_not_convert`` lists what is left as it is; the rest has one scheme."""
    if (fmt := config.get("fmt", "e4m3")) != "e4m3":
        raise CheckpointError(f"{name}: fmt: expected 'e4m3', got {fmt!r}")
    kind = (config.get("activation_scheme", "dynamic"), tuple(config.get("weight_block_size") or ()))
    if kind not in SCHEME_OF:
        text = f"activation_scheme and weight_block_size: expected {known(SCHEME_OF)}, got {kind}"
        raise CheckpointError(f"{name}: {text}")
    scheme = SCHEMES[SCHEME_OF[kind]]
    names = Names(scale="weight_scale_inv") if scheme.weight.scale.block else Names()
    skipped = listed(name, config, "modules_to_not_convert", "ignored_layers")
    return Quantization("fp8", (*map(Rule, skipped), Rule(EVERYTHING, scheme)), names=names)


def write(rules: Sequence[Rule], unquantized: list[str]) -> dict[str, Any]:
    """One scheme for all that is quantized."""
    schemes = {rule.scheme for rule in rules}
    found = next((kind for kind, name in SCHEME_OF.items() if schemes == {SCHEMES[name]}), None)
    if found is None:
        raise CheckpointError(f"fp8: expected one scheme of {', '.join(SCHEME_OF.values())}, got {shown(schemes)}")
    whole = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": found[0]}
    block = {"weight_block_size": list(found[1])} if found[1] else {}
    return {**whole, **block, "modules_to_not_convert": unquantized}
