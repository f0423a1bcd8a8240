"""The eight published text models, by name: what their config.json files say."""

from __future__ import annotations

from typing import Any


def _text(hidden: int, layers: int, value_heads: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe_text" if "num_experts" in more else "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": False,
        **more,
    }


def _experts(count: int, top_k: int, size: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _text(1024, 24, 16, 8, 2, intermediate_size=3584, tie_word_embeddings=True),
    "qwen3.5-2b": _text(2048, 24, 16, 8, 2, intermediate_size=6144, tie_word_embeddings=True),
    "qwen3.5-4b": _text(2560, 32, 32, 16, 4, intermediate_size=9216, tie_word_embeddings=True),
    "qwen3.5-9b": _text(4096, 32, 32, 16, 4, intermediate_size=12288),
    "qwen3.5-27b": _text(5120, 64, 48, 24, 4, intermediate_size=17408),
    "qwen3.5-35b-a3b": _text(2048, 40, 32, 16, 2, **_experts(256, 8, 512)),
    "qwen3.5-122b-a10b": _text(3072, 48, 64, 32, 2, **_experts(256, 8, 1024)),
    "qwen3.5-397b-a17b": _text(4096, 60, 64, 32, 2, **_experts(512, 10, 1024)),
}
