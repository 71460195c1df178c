"""Configs of models that transformers builds in a moment, with two layers and eight experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}


def tiny_config(folder: Path, family: str) -> Path:
    """Write ``config.json`` of ``qwen3_moe``, ``gpt_oss`` or ``llama``, which has no experts, and return the folder."""
    import transformers

    routed = SIZES | {"num_experts_per_tok": 2}
    made = {
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**routed, moe_intermediate_size=96, num_experts=8),
        "gpt_oss": lambda: transformers.GptOssConfig(**routed, num_local_experts=8),
        "llama": lambda: transformers.LlamaConfig(**SIZES),
    }
    made[family]().save_pretrained(folder)
    return folder
