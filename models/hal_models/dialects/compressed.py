"""``compressed-tensors``: groups of targets, each with formats of weights and of inputs. Source: its config_groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.errors import CheckpointError
from hal.formats import STATIC_FP8, TOKEN_FP8, Quantized, Scheme
from hal_models.dialects.shared import EVERYTHING, Config, by_scheme, expression, fp8_weight, known, kv_cache, listed
from hal_models.quantization import Quantization, Rule


def read(name: str, config: Config) -> Quantization:
    ignored = tuple(map(Rule, listed(name, config, "ignore")))
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{name}: config_groups: expected groups, got {groups!r}")
    named: list[Rule] = []
    every: list[Rule] = []
    for key, group in groups.items():
        where = f"{name}: config_groups.{key}"
        scheme = _compressed_scheme(where, group)
        for target in listed(where, group, "targets"):
            if target == "Linear":  # every module of that class
                every.append(Rule(EVERYTHING, scheme))
            else:
                named.append(Rule(target, scheme))
    kv = config.get("kv_cache_scheme")
    # a target that names modules stands before one that names their class
    return Quantization("compressed-tensors", (*ignored, *named, *every), kv_cache(kv))


def _compressed_scheme(where: str, group: Config) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{where}.weights: expected an object, got {weights!r}")
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
    forms = {("float", 8, "channel"): "channel", ("float", 8, "tensor"): "tensor"}
    if kind not in forms or weights.get("dynamic"):
        raise CheckpointError(f"{where}.weights: expected {known(forms)}, got {kind}, dynamic {weights.get('dynamic')}")
    return Scheme(fp8_weight(forms[kind]), _compressed_inputs(f"{where}.input_activations", inputs))


def _compressed_inputs(where: str, inputs: Any) -> Quantized | None:
    if inputs is None:
        return None
    kind = (inputs.get("type"), inputs.get("num_bits"), inputs.get("strategy"), bool(inputs.get("dynamic")))
    forms = {("float", 8, "token", True): TOKEN_FP8, ("float", 8, "tensor", False): STATIC_FP8}
    if kind not in forms:
        raise CheckpointError(f"{where}: expected {known(forms)}, got {kind}")
    return forms[kind]


def write(rules: Sequence[Rule], unquantized: list[str]) -> dict[str, Any]:
    def tensors(strategy: str, dynamic: bool) -> dict[str, Any]:
        return {
            "num_bits": 8, "type": "float", "strategy": strategy, "dynamic": dynamic, "symmetric": True,
            "group_size": None, "block_structure": None, "actorder": None,
        }  # fmt: skip

    def inputs(scheme: Scheme) -> dict[str, Any] | None:
        if scheme.activations is None:
            return None
        static = scheme.activations.scale.static
        return tensors("tensor" if static else "token", not static)

    groups = {
        f"group_{index}": {
            "targets": ["Linear" if p == EVERYTHING else f"re:{expression(p)}" for p in patterns],
            "weights": tensors(scheme.weight.scale.per, False),
            "input_activations": inputs(scheme),
            "output_activations": None,
        }
        for index, (scheme, patterns) in enumerate(by_scheme(rules))
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups,
        "ignore": unquantized, "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip
