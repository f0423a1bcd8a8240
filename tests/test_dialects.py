"""Which scheme a module has, as each producer writes it down: lists, patterns, prefixes; and what is not understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import config, save
from hal_models.dialects import WRITERS, read, written
from hal_models.quantization import MIXES, PLAIN, Quantization, Rule, bare, recipe
from hal_models.qwen3_5.config import configure

from hal.errors import CheckpointError, UnknownName
from hal.formats import SCHEMES

CHANNEL, TENSOR = SCHEMES["fp8_channel"], SCHEMES["fp8_tensor"]
MODULES = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def compressed(**changed: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True}
    inputs = {**weights, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    whole = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {**whole, **changed}


def quark(weight: Any = None, inputs: Any = None, **changed: Any) -> dict[str, Any]:
    form = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
    entry = {"weight": weight or form, "input_tensors": inputs or {**form, "ch_axis": 1, "is_dynamic": True}}
    return {"quant_method": "quark", "global_quant_config": entry, "layer_quant_config": {}, "exclude": [], **changed}


def mixed(**layers: str) -> dict[str, Any]:
    named = {f"model.language_model.layers.{n.replace('_', '.', 1)}": {"quant_algo": a} for n, a in layers.items()}
    return {
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": named, "exclude_modules": ["lm_head"]}
    }


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", "model.", ""])
@pytest.mark.parametrize(
    "pattern",
    [
        "{}layers.0.linear_attn.in_proj_a", "re:{}layers.*in_proj_a$", "{}layers.0.linear_attn.in_proj_a*",
        "re:.*in_proj_a", "*in_proj_a", "in_proj_a",
    ],
)  # fmt: skip
def test_a_list_may_name_modules_under_any_prefix(pattern: str, prefix: str) -> None:
    found = read("here", quark(exclude=[pattern.format(prefix)]))
    for name in ("model.language_model.layers.0.linear_attn.", "layers.0.linear_attn."):
        assert found.scheme(f"{name}in_proj_a") is None
        assert found.scheme(f"{name}in_proj_qkv") == CHANNEL


def test_text_names_whole_components() -> None:
    found = Quantization("", (Rule("mlp.gate"), Rule("visual"), Rule("*", CHANNEL)))
    assert found.scheme("layers.3.mlp.gate") is None
    assert found.scheme("model.visual.blocks.0.attn.qkv") is None
    assert found.scheme("layers.3.mlp.gate_proj") == CHANNEL
    assert bare("model.language_model.layers.0.mlp") == bare("layers.0.mlp")


@pytest.mark.parametrize("method", ["compressed-tensors", "quark"])
def test_what_is_not_listed_is_not_quantized(method: str) -> None:
    only = {
        "compressed-tensors": compressed(),
        "quark": quark(global_quant_config={}, layer_quant_config={"*out_proj": quark()["global_quant_config"]}),
    }[method]
    if method == "compressed-tensors":
        only["config_groups"]["group_0"]["targets"] = ["re:.*out_proj$"]
    found = read("here", only)
    assert [found.scheme(f"layers.0.linear_attn.{m}") for m in MODULES] == [None] * 4 + [CHANNEL]


def test_each_layer_of_a_mix_has_its_own() -> None:
    found = read("here", mixed(**{"0_mlp.up_proj": "FP8", "1_mlp.up_proj": "FP8_PER_CHANNEL_PER_TOKEN"}))
    assert [found.scheme(f"model.layers.{i}.mlp.up_proj") for i in (0, 1, 2)] == [TENSOR, CHANNEL, None]
    assert found.scheme("mtp.layers.0.mlp.up_proj") is None


def test_a_named_target_stands_before_its_class() -> None:
    groups = compressed()["config_groups"]
    weights = {**groups["group_0"]["weights"], "strategy": "tensor"}
    inputs = {**weights, "dynamic": False}
    groups["group_1"] = {"targets": ["re:.*down_proj"], "weights": weights, "input_activations": inputs}
    found = read("here", compressed(config_groups=groups))
    assert (found.scheme("layers.0.mlp.down_proj"), found.scheme("layers.0.mlp.up_proj")) == (TENSOR, CHANNEL)
    assert found.scheme("lm_head") is None


def test_an_ignore_list_of_names_and_expressions_beside_packed_4_bits() -> None:
    form = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": form, "input_activations": {**form, "dynamic": "local"}}}
    ignore = ["lm_head", "model.layers.3.self_attn.q_proj", "re:.*linear_attn.*"]
    found = read("here", compressed(config_groups=groups, format="nvfp4-pack-quantized", ignore=ignore))
    nvfp4 = SCHEMES["nvfp4"]
    assert [found.scheme(f"model.layers.0.linear_attn.{m}") for m in MODULES] == [None] * 5
    assert [found.scheme(f"model.layers.3.self_attn.{m}_proj") for m in "qkv"] == [None, nvfp4, nvfp4]
    assert found.scheme("lm_head") is None
    names = found.named(nvfp4)
    assert (names.weight, names.within, names.divides) == ("weight_packed", "weight_global_scale", True)


def test_a_list_of_every_expert_is_looked_up_by_name() -> None:
    layers = {f"model.layers.{i}.mlp.experts.{e}.{m}_proj": {"quant_algo": "NVFP4"} for i in range(40)
              for e in range(64) for m in ("gate", "up", "down")}  # fmt: skip
    whole = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["*layers.7.*"]}
    found = read("here", {**whole, "quantized_layers": layers})
    asked: list[str] = []
    names = Rule.names
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "names", lambda rule, module: asked.append(rule.pattern) or names(rule, module))
        schemes = {name: found.scheme(name) for name in layers}
    assert set(asked) == {"*layers.7.*"}
    assert {scheme is None for name, scheme in schemes.items() if ".layers.7." in name} == {True}
    assert {scheme for name, scheme in schemes.items() if ".layers.7." not in name} == {SCHEMES["nvfp4"]}


def test_weights_alone() -> None:
    groups = compressed()["config_groups"]
    groups["group_0"]["input_activations"] = None
    found = read("here", compressed(config_groups=groups)).scheme("layers.0.mlp.up_proj")
    assert found is not None
    assert (found.weight, found.activations) == (CHANNEL.weight, None)


SAYS = {
    "fp8": ("fp8_tensor", "fp8_block"),
    "modelopt": ("fp8_tensor", "fp8_channel", "nvfp4"),
    "compressed-tensors": ("fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"),
    "quark": ("fp8_tensor", "fp8_channel", "mxfp4"),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dialect", WRITERS)
def test_what_is_written_is_read_again(name: str, dialect: str) -> None:
    rules = recipe(name, also=["lm_head"], exclude=["layers.1.mlp"])
    modules = ["lm_head", *(f"model.layers.{i}.{m}" for i in (0, 1) for m in ("linear_attn.in_proj_a", "mlp.up_proj"))]
    plain = [m for m in modules if Quantization("", rules).scheme(m) is None]
    if name not in SAYS[dialect]:
        with pytest.raises(CheckpointError, match=f"{dialect}: expected .*got {name}"):
            written(dialect, rules, plain)
        return
    found = read("here", json.loads(json.dumps(written(dialect, rules, plain))))
    assert {m: found.scheme(m) for m in modules} == {m: Quantization("", rules).scheme(m) for m in modules}
    assert len(plain) == 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq"}, ("quant_method", "'gptq'", "quark")),
        ({}, ("quant_method", "None")),
        (compressed(ignore="lm_head"), ("ignore", "'lm_head'")),
        (compressed(ignore=["re:(("]), ("'re:(('", "no regular expression")),
        (compressed(config_groups={}), ("config_groups",)),
        (compressed(config_groups={"g": {"weights": {"type": "int", "num_bits": 4}}}), ("'int'", "4")),
        (quark(weight={"dtype": "int4", "qscheme": "per_group"}), ("global_quant_config.weight", "int4")),
        (quark(inputs={"dtype": "fp8_e4m3", "qscheme": "per_group"}), ("input_tensors", "per_group")),
        (quark(layer_type_quant_config={"Linear": {}}), ("layer_type_quant_config",)),
        (mixed(**{"0_mlp.up_proj": "W4A8_AWQ"}), ("W4A8_AWQ", "FP8")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ("group_size", "16", "32")),
        ({"quant_method": "fp8", "activation_scheme": "sometimes"}, ("activation_scheme", "sometimes")),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, ("weight_block_size", "64")),
        (quark(weight={"dtype": "fp4", "qscheme": "per_group", "group_size": 16}), ("weight", "16")),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ("fmt", "e5m2")),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_an_error(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as error:
        read("here", config)
    for word in ("here", *words):
        assert word in str(error.value)


def test_recipes_leave_out_what_nobody_quantizes() -> None:
    found = Quantization("", recipe("fp8_channel"))
    for module in ("lm_head", "layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate", "mtp.fc", "visual.merger.fc"):
        assert found.scheme(module) is None
    assert Quantization("", recipe("fp8_channel", also=PLAIN)).scheme("layers.0.linear_attn.in_proj_b") == CHANNEL
    with pytest.raises(UnknownName, match="did you mean 'in_proj_b'"):
        recipe("fp8_channel", also=["in_proj_bb"])


@pytest.mark.parametrize("name", [name for name in MIXES if name.startswith("mxfp4")])
def test_a_mix_has_a_scheme_for_the_mixers_and_one_for_all_else(name: str) -> None:
    of = Quantization("", recipe(name))
    quantized = name == "mxfp4+fp8_all"
    wanted = {
        "layers.0.linear_attn.in_proj_qkv": CHANNEL, "layers.3.self_attn.o_proj": CHANNEL,
        "layers.0.linear_attn.in_proj_b": CHANNEL if quantized else None,
        "layers.0.linear_attn.in_proj_a": CHANNEL if quantized else None,
        "layers.0.mlp.experts.7.up_proj": SCHEMES["mxfp4"], "layers.0.mlp.shared_expert.down_proj": SCHEMES["mxfp4"],
        "layers.0.mlp.gate": None, "lm_head": None, "mtp.layers.0.self_attn.q_proj": None,
    }  # fmt: skip
    assert {m: of.scheme(f"model.language_model.{m}") for m in wanted} == wanted
    found = read("here", json.loads(json.dumps(written("quark", recipe(name), [m for m in wanted if not wanted[m]]))))
    assert {m: found.scheme(m) for m in wanted} == wanted


def test_modelopt_writes_beside_the_configuration(tmp_path: Path) -> None:
    save(tmp_path, config(), {})
    beside = mixed(**{"0_linear_attn.out_proj": "FP8"})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert configure(str(tmp_path)).scheme("layers.0.linear_attn.out_proj") == TENSOR
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object"):
        configure(str(tmp_path))
