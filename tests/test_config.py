"""The published sizes, and the forms in which files say one thing: nesting, tied heads, rotary embedding."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import ROPE, config, nested
from facts import device
from hal_models.qwen3_5.config import configure, parse
from hal_models.qwen3_5.model import GatedDeltaNet, Shares
from hal_models.qwen3_5.published import PUBLISHED

from hal.errors import CheckpointError
from hal.runtime import Runtime

SECTIONS = [11, 11, 10]
WIDE = {"head_dim": 256, "rope_parameters": None}
# hidden, layers, full layers, value heads, heads, KV heads, intermediate, experts, top k, tied
SIZES = {
    "qwen3.5-0.8b": (1024, 24, 6, 16, 8, 2, 3584, 0, 0, True),
    "qwen3.5-2b": (2048, 24, 6, 16, 8, 2, 6144, 0, 0, True),
    "qwen3.5-4b": (2560, 32, 8, 32, 16, 4, 9216, 0, 0, True),
    "qwen3.5-9b": (4096, 32, 8, 32, 16, 4, 12288, 0, 0, False),
    "qwen3.5-27b": (5120, 64, 16, 48, 24, 4, 17408, 0, 0, False),
    "qwen3.5-35b-a3b": (2048, 40, 10, 32, 16, 2, 512, 256, 8, False),
    "qwen3.5-122b-a10b": (3072, 48, 12, 64, 32, 2, 1024, 256, 8, False),
    "qwen3.5-397b-a17b": (4096, 60, 15, 64, 32, 2, 1024, 512, 10, False),
}
# rows of the packed input projection by value heads, over 1, 2, 4 and 8 ranks
PACKED = {
    16: (8224, 4112, 2056, 1028),
    32: (12352, 6176, 3088, 1544),
    48: (16480, 8240, 4120, 2060),
    64: (20608, 10304, 5152, 2576),
}


def fails(cfg: dict[str, Any], *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse("here", cfg)
    for word in ("here", *words):
        assert word in str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    cfg = configure(name)
    full = cfg.layers.count("full_attention")
    sizes = (cfg.hidden, len(cfg.layers), full, cfg.value_heads, cfg.heads, cfg.kv_heads)
    assert (*sizes, cfg.intermediate, cfg.experts, cfg.top_k, cfg.tied) == SIZES[name]
    assert all((kind == "full_attention") == (index % 4 == 3) for index, kind in enumerate(cfg.layers))
    assert (cfg.key_heads, cfg.key_head_dim, cfg.value_head_dim, cfg.conv_width) == (16, 128, 128, 4)
    assert (cfg.head_dim, cfg.rotary_dim, cfg.theta, cfg.sections) == (256, 64, 1e7, (11, 11, 10))
    assert (cfg.vocab, cfg.eps, cfg.dtype, cfg.state_dtype) == (248320, 1e-6, "bfloat16", "float32")
    assert cfg.max_positions == 262144
    assert cfg.shared_intermediate == (cfg.intermediate if cfg.experts else 0)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_packed_widths(name: str, world: int) -> None:
    cfg = configure(name)
    runtime = Runtime(device("cpu"), load=False, world=world)
    mixer = GatedDeltaNet(cfg, Shares(cfg, world), runtime, "mixer")
    op = runtime.group_of(mixer.in_proj).members["op"]
    rows = sum(param.rows for param in op.params() if param.memory == "weight")
    assert rows == PACKED[cfg.value_heads][(1, 2, 4, 8).index(world)]


@pytest.mark.parametrize("experts", [{}, {"num_experts": 4}], ids=["dense", "experts"])
def test_flat_and_nested_are_the_same(experts: dict[str, Any]) -> None:
    flat = config(**experts)
    outer = {**flat, "model_type": flat["model_type"].removesuffix("_text")}
    forms = [flat, outer, nested(flat), nested(flat, vision_config={"depth": 2}, dtype="float32")]
    assert all(parse("here", form) == parse("here", flat) for form in forms)


TIED: list[tuple[dict[str, Any], dict[str, Any], bool | None]] = [
    ({}, {}, False),
    ({"tie_word_embeddings": True}, {}, True),
    ({"tie_word_embeddings": False}, {}, False),
    ({}, {"tie_word_embeddings": True}, True),
    ({}, {"tie_word_embeddings": False}, False),
    ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}, True),
    ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, None),
    ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, None),
]


@pytest.mark.parametrize(("inner", "outer", "tied"), TIED)
def test_tied_embeddings_inside_and_outside(inner: dict[str, Any], outer: dict[str, Any], tied: bool | None) -> None:
    cfg = nested(config(**{"tie_word_embeddings": None, **inner}), **outer)
    if tied is None:
        fails(cfg, "tie_word_embeddings contradicts itself", "True", "False")
    else:
        assert parse("here", cfg).tied is tied


FULL = {**ROPE, "mrope_section": SECTIONS, "mrope_interleaved": True}
BARE = {key: value for key, value in FULL.items() if key != "rope_type"}
NO_THETA = {key: value for key, value in FULL.items() if key != "rope_theta"}
FORMS: dict[str, dict[str, Any]] = {
    "only outside": BARE,
    "only inside": {"rope_parameters": FULL},
    "inside without theta": {"rope_parameters": NO_THETA, "rope_theta": 10000000.0},
    "type": {"rope_parameters": {**BARE, "type": "default"}},
    "both kinds of type": {"rope_parameters": {**FULL, "type": "mrope"}},
    "per layer type": {"rope_parameters": {"full_attention": FULL, "linear_attention": {"rope_type": "default"}}},
    "scaling": {"rope_scaling": {**NO_THETA, "type": "mrope"}, "rope_theta": 10000000},
    "both places": {"rope_parameters": FULL, **BARE},
    "scaling null": {"rope_parameters": FULL, "rope_scaling": None},
}


@pytest.mark.parametrize("form", FORMS)
def test_rope_says_the_same_in_every_form(form: str) -> None:
    cfg = parse("here", {**config(**WIDE), **FORMS[form]})
    assert (cfg.theta, cfg.rotary_dim, cfg.sections) == (1e7, 64, (11, 11, 10))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ("does not state rope_theta",)),
        ({"rope_parameters": NO_THETA}, ("does not state rope_theta",)),
        ({"rope_parameters": {"linear_attention": FULL}}, ("does not state rope_theta",)),
        ({"rope_parameters": FULL, "rope_theta": 10000}, ("rope_theta contradicts itself", "10000 against 10000000")),
        ({"rope_parameters": FULL, "rope_scaling": {"rope_theta": 5}}, ("rope_theta", "10000000 against 5")),
        ({"rope_parameters": FULL, "partial_rotary_factor": 1.0}, ("partial_rotary_factor", "1.0 against 0.25")),
        ({"rope_parameters": FULL, "rope_scaling": {"mrope_section": [16, 8, 8]}}, ("mrope_section", "[16, 8, 8]")),
        ({"rope_parameters": {**FULL, "mrope_section": [11, 11, 11]}}, ("mrope_section", "sum 32", "[11, 11, 11]")),
        ({"rope_parameters": {**FULL, "mrope_section": [32]}}, ("mrope_section", "3 sizes", "[32]")),
        ({"rope_parameters": {**FULL, "rope_type": "yarn"}}, ("rope_type", "'yarn'")),
        ({"rope_parameters": {**BARE, "type": "linear"}}, ("type", "'linear'")),
        ({"rope_parameters": {**FULL, "type": "yarn"}}, ("type", "'yarn'")),
        ({"rope_parameters": FULL, "rope_scaling": {"type": "dynamic"}}, ("type", "'dynamic'")),
        ({"rope_parameters": {**FULL, "mrope_interleaved": False}}, ("mrope_interleaved", "False")),
        ({"rope_parameters": {**FULL, "rope_theta": "1e7"}}, ("rope_theta", "'1e7'")),
        ({"rope_parameters": {**FULL, "rope_theta": 0}}, ("rope_theta", "positive", "0")),
        ({"rope_parameters": [FULL]}, ("rope_parameters", "expected an object")),
    ],
)
def test_rope_that_cannot_be_taken(changed: dict[str, Any], words: tuple[str, ...]) -> None:
    fails({**config(**WIDE), **changed}, *words)
