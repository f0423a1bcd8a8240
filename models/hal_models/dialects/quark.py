"""``quark``: one configuration for all, others by pattern. Source: Quark's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.errors import CheckpointError
from hal.formats import STATIC_FP8, TOKEN_FP8, Quantized, Scheme
from hal_models.dialects.shared import EVERYTHING, Config, fp8_weight, known, kv_cache, listed
from hal_models.quantization import Quantization, Rule


def read(name: str, config: Config) -> Quantization:
    excluded = tuple(map(Rule, listed(name, config, "exclude")))
    if config.get("layer_type_quant_config"):
        raise CheckpointError(
            f"{name}: layer_type_quant_config: is not read, got {config['layer_type_quant_config']!r}"
        )
    named = [
        Rule(pattern, _quark_scheme(f"{name}: layer_quant_config.{pattern}", entry))
        for pattern, entry in (config.get("layer_quant_config") or {}).items()
    ]
    whole = _quark_scheme(f"{name}: global_quant_config", config.get("global_quant_config") or {})
    return Quantization(
        "quark", (*excluded, *named, Rule(EVERYTHING, whole)), kv_cache(config.get("kv_cache_quant_config"))
    )


def _quark_scheme(where: str, entry: Config) -> Scheme | None:
    weight, inputs = entry.get("weight"), entry.get("input_tensors")
    if weight is None:
        return None
    kind = (weight.get("dtype"), weight.get("qscheme")) if isinstance(weight, Mapping) else ()
    forms = {("fp8_e4m3", "per_channel"): "channel", ("fp8_e4m3", "per_tensor"): "tensor"}
    if kind not in forms or weight.get("is_dynamic"):
        raise CheckpointError(f"{where}.weight: expected {known(forms)}, got {weight!r}")
    return Scheme(fp8_weight(forms[kind]), _quark_inputs(f"{where}.input_tensors", inputs))


def _quark_inputs(where: str, inputs: Any) -> Quantized | None:
    if inputs is None:
        return None
    kind = (inputs.get("dtype"), inputs.get("qscheme"), bool(inputs.get("is_dynamic")))
    # a row of x is a channel of its first axis to Quark: PTPC
    forms = {("fp8_e4m3", "per_channel", True): TOKEN_FP8, ("fp8_e4m3", "per_tensor", False): STATIC_FP8}
    if kind not in forms:
        raise CheckpointError(f"{where}: expected {known(forms)}, got {kind}")
    return forms[kind]


def write(rules: Sequence[Rule], unquantized: list[str]) -> dict[str, Any]:
    def tensors(qscheme: str, axis: int | None, dynamic: bool) -> dict[str, Any]:
        return {
            "dtype": "fp8_e4m3", "qscheme": qscheme, "ch_axis": axis, "is_dynamic": dynamic, "group_size": None,
            "symmetric": True, "round_method": "half_even", "scale_type": "float",
        }  # fmt: skip

    def entry(scheme: Scheme) -> dict[str, Any]:
        by_rows = scheme.weight.scale.per == "channel"
        inputs = None
        if scheme.activations:
            token = scheme.activations.scale.per == "token"
            inputs = tensors("per_channel" if token else "per_tensor", 1 if token else None, token)
        return {
            "weight": tensors("per_channel" if by_rows else "per_tensor", 0 if by_rows else None, False),
            "input_tensors": inputs, "output_tensors": None, "bias": None,
        }  # fmt: skip

    found = {rule.pattern: entry(rule.scheme) for rule in rules if rule.scheme}
    return {
        "quant_method": "quark",
        "global_quant_config": found.pop(EVERYTHING, {"weight": None, "input_tensors": None}),
        "layer_quant_config": found, "layer_type_quant_config": {}, "exclude": unquantized,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }  # fmt: skip
