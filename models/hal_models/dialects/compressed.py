"""``compressed-tensors``: groups of targets, each with formats of weights and of inputs. Source: its config_groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hal.errors import CheckpointError
from hal.formats import BLOCK_FP8, NVFP4, SCHEMES, STATIC_FP8, TOKEN_FP8, Quantized, Scheme
from hal_models.dialects.shared import EVERYTHING, Config, by_scheme, expression, known, kv_cache, listed, shown
from hal_models.quantization import Names, Quantization, Rule

# type, bits, strategy, the size of a group or block, dynamic
Kind = tuple[Any, ...]
WEIGHTS: dict[Kind, Quantized] = {
    ("float", 8, "channel", None, False): SCHEMES["fp8_channel"].weight,
    ("float", 8, "tensor", None, False): SCHEMES["fp8_tensor"].weight,
    ("float", 8, "block", (128, 128), False): SCHEMES["fp8_block"].weight,
    ("float", 4, "tensor_group", 16, False): SCHEMES["nvfp4"].weight,
}
INPUTS: dict[Kind, Quantized] = {
    ("float", 8, "token", None, True): TOKEN_FP8,
    ("float", 8, "tensor", None, False): STATIC_FP8,
    ("float", 8, "group", 128, True): BLOCK_FP8,
    ("float", 4, "tensor_group", 16, "local"): NVFP4,
}
WITHIN = Names("weight_packed", input_scale="input_global_scale", within="weight_global_scale", divides=True)


def read(name: str, config: Config) -> Quantization:
    """A target that names modules stands before one that names their class."""
    ignored = tuple(map(Rule, listed(name, config, "ignore")))
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{name}: config_groups: expected groups, got {groups!r}")
    named: list[Rule] = []
    every: list[Rule] = []
    for key, group in groups.items():
        where = f"{name}: config_groups.{key}"
        inputs = group.get("input_activations")
        activations = None if inputs is None else _form(f"{where}.input_activations", inputs, INPUTS)
        scheme = Scheme(_form(f"{where}.weights", group.get("weights"), WEIGHTS), activations)
        for target in listed(where, group, "targets"):
            (every if target == "Linear" else named).append(Rule(EVERYTHING if target == "Linear" else target, scheme))
    rules, kv = (*ignored, *named, *every), kv_cache(config.get("kv_cache_scheme"))
    return Quantization("compressed-tensors", rules, kv, within=WITHIN)


def _form(where: str, entry: Any, forms: Mapping[Kind, Quantized]) -> Quantized:
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{where}: expected an object, got {entry!r}")
    block = entry.get("block_structure")
    size = tuple(block) if block else entry.get("group_size")
    kind = (entry.get("type"), entry.get("num_bits"), entry.get("strategy"), size, entry.get("dynamic") or False)
    if kind not in forms:
        raise CheckpointError(f"{where}: expected {known(forms)}, got {kind}")
    return forms[kind]


def write(rules: Sequence[Rule], unquantized: list[str]) -> dict[str, Any]:
    """A group for each scheme."""
    found = list(by_scheme(rules))
    forms = {scheme: "nvfp4-pack-quantized" if scheme.weight.scale.within else "float-quantized" for scheme, _ in found}
    groups = {
        f"group_{index}": {
            "format": forms[scheme],
            "targets": ["Linear" if p == EVERYTHING else f"re:{expression(p)}" for p in patterns],
            "weights": _entry(scheme.weight, WEIGHTS, scheme),
            "input_activations": _entry(scheme.activations, INPUTS, scheme) if scheme.activations else None,
            "output_activations": None,
        }
        for index, (scheme, patterns) in enumerate(found)
    }
    return {
        "quant_method": "compressed-tensors", "config_groups": groups,
        "format": "mixed-precision" if len(set(forms.values())) > 1 else next(iter(forms.values()), "dense"),
        "ignore": unquantized, "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def _entry(form: Quantized, forms: Mapping[Kind, Quantized], scheme: Scheme) -> dict[str, Any]:
    found = next((kind for kind, known_ in forms.items() if known_ == form), None)
    if found is None:
        raise CheckpointError(f"compressed-tensors: expected weights in {shown_forms()}, got {scheme}")
    kind, bits, strategy, size, dynamic = found
    block = list(size) if isinstance(size, tuple) else None
    return {
        "num_bits": bits, "type": kind, "strategy": strategy, "dynamic": dynamic, "symmetric": True,
        "group_size": None if block else size, "block_structure": block, "actorder": None,
    }  # fmt: skip


def shown_forms() -> str:
    """The schemes that can be written."""
    return shown(s for s in SCHEMES.values() if s.weight in WEIGHTS.values())
