"""``fp8``: Qwen's own, and others of that form. Source: config.json of Qwen's FP8 models."""

from __future__ import annotations

from hal.errors import CheckpointError
from hal.formats import SCHEMES, STATIC_FP8, TOKEN_FP8
from hal_models.dialects.shared import EVERYTHING, Config, listed
from hal_models.quantization import Quantization, Rule


def read(name: str, config: Config) -> Quantization:
    if (fmt := config.get("fmt", "e4m3")) != "e4m3":
        raise CheckpointError(f"{name}: fmt: expected 'e4m3', got {fmt!r}")
    block = config.get("weight_block_size")
    activations = {"dynamic": TOKEN_FP8, "static": STATIC_FP8}.get(config.get("activation_scheme", "dynamic"))
    if activations is None:
        raise CheckpointError(
            f"{name}: activation_scheme: expected dynamic or static, got {config['activation_scheme']!r}"
        )
    if block is None and activations.scale.static:
        scheme = SCHEMES["fp8_tensor"]
    else:
        raise CheckpointError(f"{name}: weight_block_size: no scheme is known for {block!r} with {activations}")
    skipped = listed(name, config, "modules_to_not_convert", "ignored_layers")
    return Quantization("fp8", (*map(Rule, skipped), Rule(EVERYTHING, scheme)))
