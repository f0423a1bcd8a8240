"""Checkpoints built by hand, of any form: index-coded tensors, the names and configurations that files have."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from facts import device, runtime
from hal_models.qwen3_5.config import configure
from hal_models.qwen3_5.model import Qwen35
from hal_models.qwen3_5.weights import Loaded, load
from safetensors.torch import save_file

from hal.layout import Separate

Tensors = dict[str, torch.Tensor]
ROPE = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}


def config(**changed: Any) -> dict[str, Any]:
    """A flat config.json of one linear and one full attention layer; a field set to None is left out."""
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    found = {
        "model_type": "qwen3_5_moe_text" if "num_experts" in changed else "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "dtype": "float32",
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 40,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **(experts if "num_experts" in changed else {"intermediate_size": 32}),
        **changed,
    }
    return {key: value for key, value in found.items() if value is not None}


def nested(flat: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """The configuration of the whole, with the text model inside."""
    kind = flat["model_type"].removesuffix("_text")
    return {"model_type": kind, "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": flat, **outer}


def shapes(cfg: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the configuration asks for, experts fused."""
    hidden, values = cfg["hidden_size"], cfg["linear_num_value_heads"]
    key, value = cfg["linear_num_key_heads"] * cfg["linear_key_head_dim"], values * cfg["linear_value_head_dim"]
    width, kv = (cfg[f"num_{n}_heads"] * cfg["head_dim"] for n in ("attention", "key_value"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (cfg["vocab_size"], hidden)}
    found["model.norm.weight"] = (hidden,)
    if not cfg["tie_word_embeddings"]:
        found["lm_head.weight"] = (cfg["vocab_size"], hidden)
    mixers = {
        "linear_attention": {
            "linear_attn.in_proj_qkv.weight": (2 * key + value, hidden),
            "linear_attn.in_proj_z.weight": (value, hidden),
            "linear_attn.in_proj_b.weight": (values, hidden),
            "linear_attn.in_proj_a.weight": (values, hidden),
            "linear_attn.conv1d.weight": (2 * key + value, 1, cfg["linear_conv_kernel_dim"]),
            "linear_attn.A_log": (values,),
            "linear_attn.dt_bias": (values,),
            "linear_attn.norm.weight": (cfg["linear_value_head_dim"],),
            "linear_attn.out_proj.weight": (hidden, value),
        },
        "full_attention": {
            "self_attn.q_proj.weight": (2 * width, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.q_norm.weight": (cfg["head_dim"],),
            "self_attn.k_norm.weight": (cfg["head_dim"],),
            "self_attn.o_proj.weight": (hidden, width),
        },
    }
    for index, kind in enumerate(cfg["layer_types"]):
        norms = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        layer = {**mixers[kind], **norms, **_feed_forward(cfg)}
        found |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return found


def _feed_forward(cfg: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    def dense(name: str, wide: int) -> dict[str, tuple[int, ...]]:
        named = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
        return {f"{name}.{part}_proj.weight": shape for part, shape in named.items()}

    hidden, count = cfg["hidden_size"], cfg.get("num_experts")
    if not count:
        return dense("mlp", cfg["intermediate_size"])
    wide = cfg["moe_intermediate_size"]
    return {
        "mlp.gate.weight": (count, hidden),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **dense("mlp.shared_expert", cfg["shared_expert_intermediate_size"]),
        "mlp.experts.gate_up_proj": (count, 2 * wide, hidden),
        "mlp.experts.down_proj": (count, hidden, wide),
    }


def tensors(cfg: dict[str, Any]) -> Tensors:
    """Every number in the checkpoint differs from every other, and float32 holds all of them."""
    found, start = {}, 1
    for name, shape in shapes(cfg).items():
        found[name] = torch.arange(start, start + prod(shape), dtype=torch.float32).reshape(shape)
        start += prod(shape)
    assert start < 1 << 24
    return found


def per_expert(named: Tensors) -> Tensors:
    """The same with fused experts under names of their own."""
    found: Tensors = {}
    for name, tensor in named.items():
        stem, _, leaf = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
        if not parts:
            found[name] = tensor
            continue
        for expert, whole in enumerate(tensor):
            for part, piece in zip(parts, whole.chunk(len(parts)), strict=True):
                found[f"{stem}.{expert}.{part}.weight"] = piece.clone()
    return found


def prefixed(named: Tensors, prefix: str) -> Tensors:
    """The same with another prefix than ``model.``; the head has none."""
    return {name.replace("model.", prefix, 1) if name.startswith("model.") else name: t for name, t in named.items()}


def save(folder: Path, cfg: dict[str, Any], named: Tensors) -> Path:
    """Write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cfg))
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()},
        folder / "model.safetensors",
    )
    return folder


class Pretend:
    """One of several ranks, alone: agrees with everybody, exchanges nothing."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def all_gather_object(self, value: str) -> list[str]:
        return [value] * self.world

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("one rank alone cannot compute")

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("one rank alone cannot compute")


def model(folder: Path, rank: int = 0, world: int = 1, **policy: Any) -> Qwen35:
    """The model of a folder on this CPU, not loaded, its rows to be padded where the policy wants that."""
    facts = device("cpu", gemm_row_bytes=512) if "InProj=torch.padded" in policy.get("force", ()) else "cpu"
    return Qwen35(configure(str(folder)), runtime(facts, comm=Pretend(rank, world) if world > 1 else None, **policy))


def parts(built: Qwen35) -> Tensors:
    """Every part of every storage, by site and name, whatever the layout."""
    found: Tensors = {}
    for group in built.runtime.groups:
        for storage in group.storages.values():
            read = storage.read(Separate())
            assert isinstance(read, dict)
            found |= {f"{group.name}.{name}": tensor for name, tensor in read.items()}
    return found


def loaded(folder: Path, cfg: dict[str, Any], named: Tensors) -> tuple[Tensors, Loaded]:
    """Parts and report of a checkpoint that was written and loaded."""
    built = model(save(folder, cfg, named))
    report = load(built, folder)
    return parts(built), report
