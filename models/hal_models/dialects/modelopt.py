"""``modelopt``: one algorithm, or one for each layer. Source: hf_quant_config.json, and its copy in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal.errors import CheckpointError
from hal.formats import SCHEMES, Scheme
from hal_models.dialects.shared import EVERYTHING, Config, kv_cache, listed, shown
from hal_models.quantization import Quantization, Rule

MODELOPT = {"FP8": "fp8_tensor", "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel", "NVFP4": "nvfp4"}
GROUP = {"NVFP4": 16}


def read(name: str, config: Config) -> Quantization:
    inner = config.get("quantization") or config
    excluded = tuple(map(Rule, listed(name, inner, "exclude_modules", "ignore")))
    algorithm = inner.get("quant_algo")
    kv = inner.get("kv_cache_quant_algo") or kv_cache(inner.get("kv_cache_scheme"))
    if algorithm == "MIXED_PRECISION":
        layers = inner.get("quantized_layers") or {}
        found = (Rule(layer, _modelopt_scheme(f"{name}: {layer}", entry)) for layer, entry in layers.items())
        return Quantization("modelopt", (*excluded, *found), kv)
    return Quantization("modelopt", (*excluded, Rule(EVERYTHING, _modelopt_scheme(name, inner))), kv)


def _modelopt_scheme(where: str, entry: Config) -> Scheme:
    if (algorithm := entry.get("quant_algo")) not in MODELOPT:
        expected = ", ".join(("MIXED_PRECISION", *MODELOPT))
        raise CheckpointError(f"{where}: quant_algo: expected one of {expected}, got {algorithm!r}")
    if (size := entry.get("group_size") or GROUP.get(algorithm)) != GROUP.get(algorithm):
        raise CheckpointError(f"{where}: group_size of {algorithm}: expected {GROUP.get(algorithm)}, got {size}")
    return SCHEMES[MODELOPT[algorithm]]


def write(rules: Sequence[Rule], unquantized: list[str]) -> dict[str, Any]:
    algorithms = {scheme: algorithm for algorithm, name in MODELOPT.items() if (scheme := SCHEMES[name])}
    if other := {rule.scheme for rule in rules} - set(algorithms):
        raise CheckpointError(f"modelopt: expected schemes of {', '.join(MODELOPT.values())}, got {shown(other)}")
    found = {rule.pattern: _entry(algorithms[rule.scheme]) for rule in rules if rule.scheme}
    mixed = list(found) != [EVERYTHING]
    whole: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "quantized_layers": found} if mixed else found[EVERYTHING]
    return {"quant_method": "modelopt", **whole, "kv_cache_quant_algo": None, "exclude_modules": unquantized}


def _entry(algorithm: str) -> dict[str, Any]:
    return {"quant_algo": algorithm} | ({"group_size": GROUP[algorithm]} if algorithm in GROUP else {})
