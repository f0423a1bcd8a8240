"""``quark``: one configuration for all, others by pattern. Source: Quark's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.errors import CheckpointError
from hal.formats import MXFP4, SCHEMES, STATIC_FP8, TOKEN_FP8, Quantized, Scheme
from hal_models.dialects.shared import EVERYTHING, Config, known, kv_cache, listed, shown
from hal_models.quantization import Quantization, Rule

# dtype, qscheme, group_size, is_dynamic
Kind = tuple[Any, ...]
WEIGHTS: dict[Kind, Quantized] = {
    ("fp8_e4m3", "per_channel", None, False): SCHEMES["fp8_channel"].weight,
    ("fp8_e4m3", "per_tensor", None, False): SCHEMES["fp8_tensor"].weight,
    ("fp4", "per_group", 32, False): SCHEMES["mxfp4"].weight,
}
INPUTS: dict[Kind, Quantized] = {
    ("fp8_e4m3", "per_channel", None, True): TOKEN_FP8,  # a row of x is a channel of its first axis: PTPC
    ("fp8_e4m3", "per_tensor", None, False): STATIC_FP8,
    ("fp4", "per_group", 32, True): MXFP4,
}
AXES = {"per_channel": (0, 1), "per_group": (-1, -1), "per_tensor": (None, None)}  # of weights and of inputs


def read(name: str, config: Config) -> Quantization:
    """What is excluded, then patterns in their order, then the configuration for all."""
    excluded = tuple(map(Rule, listed(name, config, "exclude")))
    if by_type := config.get("layer_type_quant_config"):
        raise CheckpointError(f"{name}: layer_type_quant_config: expected none, got {by_type!r}")
    named = [
        Rule(pattern, _scheme(f"{name}: layer_quant_config.{pattern}", entry))
        for pattern, entry in (config.get("layer_quant_config") or {}).items()
    ]
    whole = _scheme(f"{name}: global_quant_config", config.get("global_quant_config") or {})
    rules = (*excluded, *named, Rule(EVERYTHING, whole))
    return Quantization("quark", rules, kv_cache(config.get("kv_cache_quant_config")))


def _scheme(where: str, entry: Config) -> Scheme | None:
    weight, inputs = entry.get("weight"), entry.get("input_tensors")
    if weight is None:
        return None
    activations = None if inputs is None else _form(f"{where}.input_tensors", inputs, INPUTS)
    return Scheme(_form(f"{where}.weight", weight, WEIGHTS), activations)


def _form(where: str, entry: Any, forms: Mapping[Kind, Quantized]) -> Quantized:
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{where}: expected an object, got {entry!r}")
    dtype = "fp4" if entry.get("dtype") == "fp4_e2m1" else entry.get("dtype")
    kind = (dtype, entry.get("qscheme"), entry.get("group_size"), bool(entry.get("is_dynamic")))
    if kind not in forms:
        raise CheckpointError(f"{where}: expected {known(forms)}, got {kind}")
    if dtype == "fp4" and (scale := entry.get("scale_format", "e8m0")) != "e8m0":
        raise CheckpointError(f"{where}: scale_format: expected 'e8m0', got {scale!r}")
    return forms[kind]


def write(rules: Sequence[Rule], unquantized: list[str]) -> dict[str, Any]:
    """The rule for everything is the configuration for all."""
    found = {rule.pattern: _written(rule.scheme) for rule in rules if rule.scheme}
    return {
        "quant_method": "quark",
        "global_quant_config": found.pop(EVERYTHING, {"weight": None, "input_tensors": None}),
        "layer_quant_config": found, "layer_type_quant_config": {}, "exclude": unquantized,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }  # fmt: skip


def _written(scheme: Scheme) -> dict[str, Any]:
    return {
        "weight": _entry(scheme.weight, WEIGHTS, scheme, 0),
        "input_tensors": _entry(scheme.activations, INPUTS, scheme, 1) if scheme.activations else None,
        "output_tensors": None, "bias": None,
    }  # fmt: skip


def _entry(form: Quantized, forms: Mapping[Kind, Quantized], scheme: Scheme, side: int) -> dict[str, Any]:
    found = next((kind for kind, known_ in forms.items() if known_ == form), None)
    if found is None:
        able = shown(s for s in SCHEMES.values() if s.weight in WEIGHTS.values())
        raise CheckpointError(f"quark: expected schemes of {able}, got {scheme}")
    dtype, qscheme, size, dynamic = found
    powers = {"scale_format": "e8m0", "scale_calculation_mode": "even"} if dtype == "fp4" else {}
    return {
        "dtype": dtype, "qscheme": qscheme, "ch_axis": AXES[qscheme][side], "is_dynamic": dynamic,
        "group_size": size, "symmetric": None if powers else True, "round_method": "half_even",
        "scale_type": "float", **powers,
    }  # fmt: skip
