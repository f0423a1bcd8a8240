"""Logits, greedy text and likelihoods from transformers' own Qwen3.5, in plain PyTorch on a CPU."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

Model: TypeAlias = Any
HIDDEN = ("fla", "causal_conv1d")


@cache
def hide_fla() -> None:
    """Import transformers' Qwen3.5 modules with the Triton packages out of sight."""
    # transformers takes whatever kernels are importable when these modules load, and Triton has no CPU.
    shown = {name: sys.modules.pop(name) for name in HIDDEN if name in sys.modules}
    sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]
    try:
        for family in ("qwen3_5", "qwen3_5_moe"):
            importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    finally:
        for name in HIDDEN:
            del sys.modules[name]
        sys.modules.update(shown)


def _classes(model_type: str) -> tuple[Any, Any]:
    """The text config and the text model for a ``model_type``, whether of the text part or of the whole."""
    hide_fla()
    import transformers

    stem = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[model_type.removesuffix("_text")]
    return getattr(transformers, f"{stem}TextConfig"), getattr(transformers, f"{stem}ForCausalLM")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    """The text model in a checkpoint folder, in eval mode; a missing or surplus tensor is an error."""
    config = json.loads((Path(folder) / "config.json").read_text())
    text = config.get("text_config", config)
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    config_class, model_class = _classes(config["model_type"])
    model, report = model_class.from_pretrained(
        str(folder),
        config=config_class(**text),
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    if wrong := {kind: keys for kind, keys in report.items() if keys}:
        raise ValueError(f"{folder}: {wrong}")
    return model.eval()


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A random tensor for one weight, of the size such a weight has in a trained model."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return noise.sigmoid()
    if name.endswith("dt_bias"):
        return -4 * noise.sigmoid()
    if name.endswith("norm.weight"):
        return 0.2 * noise + name.endswith("linear_attn.norm.weight")
    gain = 2.0 if name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")) else 1.0
    return gain * noise / math.sqrt(shape[-1])


def _split(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A weight as it is, or fused experts with each expert's projections under names of their own."""
    stem, _, leaf = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
    return {
        f"{stem}.{expert}.{part}.weight": piece.clone()
        for expert in range(len(tensor) if parts else 0)
        for part, piece in zip(parts, tensor[expert].chunk(len(parts)), strict=True)
    } or {name: tensor}


def random_checkpoint(
    folder: Path,
    *,
    key_heads: int,
    value_heads: int,
    heads: int,
    kv_heads: int,
    moe: bool = False,
    tied: bool = False,
    hidden: int = 64,
    layers: int = 4,
    head_dim: int = 32,
    key_head_dim: int = 16,
    value_head_dim: int = 16,
    intermediate: int = 48,
    vocab: int = 96,
    seed: int = 0,
    dtype: str = "float32",
    experts: int = 8,
    top_k: int = 2,
    split_experts: bool = False,
    nested: bool = False,
) -> Path:
    """A small random text checkpoint in the published layout, alone or as the text part of the whole."""
    family = "qwen3_5_moe" if moe else "qwen3_5"
    config_class, model_class = _classes(family)
    half = head_dim // 8
    sizes = {"moe_intermediate_size": intermediate, "shared_expert_intermediate_size": intermediate}
    sizes |= {"num_experts": experts, "num_experts_per_tok": top_k}
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_head_dim,
        linear_value_head_dim=value_head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [(half + 2) // 3, (half + 1) // 3, half // 3],
            "mrope_interleaved": True,
        },
        **(sizes if moe else {"intermediate_size": intermediate}),
    )
    with torch.device("meta"):
        shapes = {name: like.shape for name, like in sorted(model_class(config).state_dict().items())}
    if tied:
        del shapes["lm_head.weight"]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = _random(name, shape, generator).to(getattr(torch, dtype))
        tensors |= _split(name, tensor) if split_experts else {name: tensor}
    data = config.to_diff_dict() | {"architectures": [model_class.__name__], "dtype": dtype}
    if nested:
        tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
        whole = model_class.__name__.replace("CausalLM", "ConditionalGeneration")
        data = {"architectures": [whole], "model_type": family, "text_config": data}
        data["tie_word_embeddings"] = tied
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stepper(model: Model) -> Callable[[list[int]], Tensor]:
    """A function that appends tokens to one sequence's cache and gives their logits, one row each."""
    from transformers import DynamicCache

    past = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def step(ids: list[int]) -> Tensor:
        out = model(input_ids=torch.tensor([ids]), use_cache=True, **{name: past})
        return out.logits[0].float()  # type: ignore[no-any-return]

    return step


@torch.inference_mode()
def logits(model: Model, ids: list[int]) -> Tensor:
    """Float32 logits [len(ids), vocab] of one whole-sequence forward."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def decode_logits(model: Model, prompt: list[int], steps: int) -> tuple[list[int], Tensor]:
    """``steps`` greedy tokens and the logits each was the best of: the prompt's last, then decode steps."""
    step = stepper(model)
    rows = [step(prompt)[-1]]
    while len(rows) < steps:
        rows.append(step([int(rows[-1].argmax())])[-1])
    return [int(row.argmax()) for row in rows], torch.stack(rows)


def greedy(model: Model, prompt: list[int], most: int, stop: set[int]) -> list[int]:
    """At most ``most`` greedy tokens, decoded with the cache; the token that stops is the last one given."""
    step = stepper(model)
    ids = [int(step(prompt)[-1].argmax())]
    while len(ids) < most and ids[-1] not in stop:
        ids.append(int(step(ids[-1:])[-1].argmax()))
    return ids


def nll(model: Model, prompt: bytes, answer: bytes) -> Tensor:
    """Negative log-likelihood of each byte of ``answer`` after ``prompt``, teacher-forced."""
    rows = logits(model, list(prompt + answer)[:-1])[len(prompt) - 1 :]
    return -rows.log_softmax(-1).gather(1, torch.tensor(list(answer))[:, None])[:, 0]


class Drafter:
    """The draft head in plain PyTorch over transformers' own layer, without a cache: every call sees all rows."""

    def __init__(self, folder: Path, model: Model) -> None:
        from safetensors.torch import load_file

        found = load_file(folder / "model.safetensors")
        self.model = model
        self.weights = {name.removeprefix("mtp."): t.float() for name, t in found.items() if name.startswith("mtp.")}
        layers = model.model.layers
        at = next(i for i, layer in enumerate(layers) if hasattr(layer, "self_attn"))
        self.layer = copy.deepcopy(layers[at])
        own = {n.removeprefix("layers.0."): t for n, t in self.weights.items() if n.startswith("layers.0.")}
        self.layer.load_state_dict(own, strict=True)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return x * scale * (1 + self.weights[f"{name}.weight"])

    @torch.inference_mode()
    def __call__(self, ids: list[int], hidden: Tensor) -> tuple[int, Tensor]:
        """The token after the last of ``ids``, which follow the rows of ``hidden``; and that row after the norm."""
        count = len(ids)
        token = self.norm(self.model.model.embed_tokens(torch.tensor(ids)), "pre_fc_norm_embedding")
        x = torch.cat([token, self.norm(hidden, "pre_fc_norm_hidden")], -1) @ self.weights["fc.weight"].T
        # a row's position is that of its token
        positions = torch.arange(1, count + 1)[None]
        mask = torch.full((count, count), -math.inf).triu(1)[None, None]
        turned = self.model.model.rotary_emb(x[None], positions.expand(3, 1, count))
        out = self.layer(x[None], position_embeddings=turned, attention_mask=mask, position_ids=positions)
        row = self.norm((out[0] if isinstance(out, tuple) else out)[0, -1], "norm")
        return int(self.model.lm_head(row).argmax()), row

    def gains(self, prompt: list[int], told: list[int], most: int, drafts: int) -> list[int]:
        """Tokens that each step gains until there are ``most`` of ``told``, the target's text after the prompt."""
        tokens, found = prompt + told, []
        with torch.inference_mode():
            real = self.model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        at = len(prompt)  # tokens known, but the last
        while at + 1 < len(prompt) + most:
            ids, hidden, gain = tokens[1 : at + 1], real[:at], 1
            for _ in range(drafts):
                draft, row = self(ids, hidden)
                if draft != tokens[at + gain]:
                    break
                gain += 1
                ids, hidden = [*ids, draft], torch.cat([hidden, row[None]])
            found.append(gain)
            at += gain
        return found
