"""Fields of a config.json one by one: layers, dtypes, what is not served; files that are malformed or absent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import config, nested
from hal_models.qwen3_5.config import configure, parse
from hal_models.qwen3_5.published import PUBLISHED
from test_config import fails

from hal.errors import CheckpointError, UnknownName

REGULAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
BLOCKS = ["linear_attention", "linear_attention", "linear_attention", "attention"]
IRREGULAR = ["full_attention", "linear_attention", "full_attention", "linear_attention"]


def four(**changed: Any) -> dict[str, Any]:
    """Four layers whose kinds are for the test to state."""
    return config(num_hidden_layers=4, **{"layer_types": None, **changed})


@pytest.mark.parametrize(
    ("changed", "layers"),
    [
        ({"layer_types": REGULAR}, REGULAR),
        ({"layer_types": IRREGULAR}, IRREGULAR),
        ({"layers_block_type": BLOCKS}, REGULAR),
        ({"full_attention_interval": 4}, REGULAR),
        ({"full_attention_interval": 1}, ["full_attention"] * 4),
        ({"full_attention_interval": 5}, ["linear_attention"] * 4),
        ({"layer_types": REGULAR, "layers_block_type": BLOCKS, "full_attention_interval": 4}, REGULAR),
    ],
)
def test_kinds_of_layers(changed: dict[str, Any], layers: list[str]) -> None:
    assert list(parse("here", four(**changed)).layers) == layers


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ("neither layer_types nor full_attention_interval",)),
        ({"layer_types": IRREGULAR, "full_attention_interval": 4}, ("layer_types contradicts", "interval 4")),
        ({"layers_block_type": BLOCKS, "full_attention_interval": 2}, ("contradicts", "interval 2")),
        ({"layer_types": IRREGULAR, "layers_block_type": BLOCKS}, ("layer_types contradicts layers_block_type",)),
        ({"layer_types": REGULAR[:3]}, ("layer_types lists 3 layers", "num_hidden_layers is 4")),
        ({"layer_types": []}, ("layer_types lists 0 layers",)),
        ({"layers_block_type": [*BLOCKS, "attention"]}, ("layers_block_type lists 5 layers",)),
        ({"layer_types": [*REGULAR[:3], "sliding_attention"]}, ("layer_types", "got sliding_attention")),
        ({"layer_types": [*REGULAR[:3], ["full_attention"]]}, ("layer_types", "got ['full_attention']")),
        ({"layer_types": "full_attention"}, ("layer_types", "expected a list", "'full_attention'")),
        ({"full_attention_interval": 0}, ("full_attention_interval", "positive integer", "0")),
        ({"num_hidden_layers": -1}, ("num_hidden_layers", "positive integer", "-1")),
    ],
)
def test_kinds_of_layers_that_do_not_fit(changed: dict[str, Any], words: tuple[str, ...]) -> None:
    fails({**four(), **changed}, *words)


@pytest.mark.parametrize(
    ("inner", "outer", "dtype"),
    [
        ({}, {}, "bfloat16"),
        ({"dtype": "float16"}, {}, "float16"),
        ({"torch_dtype": "float32"}, {}, "float32"),
        ({"torch_dtype": "torch.float16"}, {}, "float16"),
        ({}, {"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float32", "torch_dtype": "torch.float32"}, {"dtype": "float32"}, "float32"),
    ],
)
def test_dtype_under_either_name(inner: dict[str, Any], outer: dict[str, Any], dtype: str) -> None:
    cfg = parse("here", nested(config(**{"dtype": None, **inner}), **outer))
    assert cfg.dtype == dtype
    assert cfg.typed(None) == cfg
    assert cfg.typed("float16") == replace(cfg, dtype="float16")


def test_dtypes_that_cannot_be_taken() -> None:
    fails(config(dtype="float8_e4m3fn"), "dtype", "'float8_e4m3fn'")
    fails(config(dtype="float16", torch_dtype="float32"), "dtype contradicts itself", "'float16' against 'float32'")
    fails(nested(config(dtype="float16"), dtype="float32"), "dtype contradicts itself")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("norm_topk_prob", False),
        ("output_gate_type", "sigmoid"),
        ("model_type", "qwen3_next"),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("head_dim", 0),
        ("vocab_size", True),
        ("rms_norm_eps", "tiny"),
        ("eos_token_id", "<|im_end|>"),
        ("eos_token_id", [1, "2"]),
    ],
)
def test_what_is_not_served_names_field_and_value(key: str, value: Any) -> None:
    fails({**config(), key: value}, key, repr(value))


def test_what_is_not_served_is_seen_outside_too() -> None:
    fails(nested(config(), attention_bias=True), "attention_bias", "True")
    fails(nested(config(), quantization_config={"quant_method": "gptq"}), "quantization_config", "'gptq'")


@pytest.mark.parametrize("gate", ["silu", "swish", None])
def test_names_of_the_one_output_gate(gate: str | None) -> None:
    assert parse("here", {**config(), "output_gate_type": gate}) == parse("here", config())


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "num_key_value_heads", "model_type", "vocab_size"])
def test_what_is_not_stated_is_named(key: str) -> None:
    cfg = config()
    del cfg[key]
    fails(cfg, f"does not state {key}")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"text_config": 3}', "\udc80"])
def test_a_malformed_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=tmp_path.name):
        configure(str(tmp_path))


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        configure(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/config\.json"):
        configure(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "qwen3.5-27", "qwen35-27b"])
def test_an_unknown_name_says_the_nearest(name: str) -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'qwen3\.5-27b'"):
        configure(name)


@pytest.mark.parametrize("published", ["qwen3.5-9b", "qwen3.5-35b-a3b"])
def test_a_published_configuration_may_stand_in_a_file(published: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[published]))
    assert replace(configure(str(tmp_path)), name=published) == configure(published)


@pytest.mark.parametrize(
    ("own", "generation", "stops"),
    [
        (None, None, ()),
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (5, "{}", (5,)),
        (None, '{"eos_token_id": 7}', (7,)),
        (5, '{"eos_token_id": [7, 5, 0]}', (5, 7, 0)),
    ],
)
def test_stop_tokens_of_both_files(own: Any, generation: str | None, stops: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(eos_token_id=own)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    assert configure(str(tmp_path)).stops == stops


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": {"a": 1}}'])
def test_a_malformed_generation_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        configure(str(tmp_path))
