"""Tiny configs of the model types of transformers that have experts, made from the defaults of their config classes."""

from collections.abc import Mapping
from typing import Any

__all__ = ["tiny_config"]

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 3,
    "moe_topk": 3, "num_shared_experts": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 2,
    "top_k_experts": 3, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "unpadded_vocab_size": 64,
    "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "depth": 1, "num_hidden_layers": 1, "encoder_layers": 1, "hidden_size": 16, "d_model": 16, "num_heads": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "encoder_attention_heads": 2, "intermediate_size": 16,
    "encoder_ffn_dim": 16, "out_hidden_size": 32, "text_hidden_size": 32, "output_dim": 32, "image_size": 28,
    "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "head_dim": 8, "n_layers": 1,
    "depths": [1], "patch_sizes": [14], "hidden_sizes": [16], "per_layer_config": {}, "output_channels": 16,
    "adapter_in_dim": 16, "adapter_input_size": 16, "adapter_out_dim": 32, "adapter_output_size": 32,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_EXTRA: dict[str, dict[str, Any]] = {
    "axk1": {"head_dim": 8},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 1},
    "dots3_note": {"per_layer_config": {}},
    "dots3_note_text": {"per_layer_config": {}},
    "glm4v_moe_text": {"rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5}},
    "glm5_next_text": {"index_kpool": 2, "qk_rope_head_dim": 0, "linear_conv_kernel_dim": 2},
    "hy_v4_vl_text": {"rope_parameters": _SECTIONS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "longcat_flash": {
        "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "zero_expert_num": 4, "head_dim": 8,
        "num_hidden_layers": 4,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
        "indexer_compress_ratio": 2, "ngram_vocab_size_base": 64, "hc_lowrank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(transformers: Any, kind: str) -> Any:
    """Return a config of model type ``kind`` of a few kilobytes; raises what its class raises."""
    cls = transformers.CONFIG_MAPPING[kind]
    return cls(**_entries(transformers, kind, cls().to_dict(), cls))


def _entries(transformers: Any, kind: str, defaults: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    nested = {key: value for key, value in defaults.items() if key.endswith("_config") and isinstance(value, dict)}
    if "text_config" in nested:
        text = nested.pop("text_config")
        kind_of_text = text["model_type"]
        entries = _entries(transformers, kind_of_text, text, transformers.CONFIG_MAPPING[kind_of_text])
        return {"text_config": entries, **{key: _tower(value) for key, value in nested.items()}}
    names = set(defaults) | set(getattr(cls, "attribute_map", {}))
    entries = {key: value for key, value in _SIZES.items() if key in names}
    layer_types = defaults.get("layer_types")
    if layer_types:
        entries["layer_types"] = [*layer_types[:2], layer_types[-1]]
    if defaults.get("mlp_layer_types"):
        entries["mlp_layer_types"] = ["dense", "sparse", "sparse"]
    return {**entries, **_EXTRA.get(kind, {})}


def _tower(defaults: Mapping[str, Any]) -> dict[str, Any]:
    parts = {k: _tower(v) for k, v in defaults.items() if k.endswith("_config") and isinstance(v, dict) and v}
    kind = {"model_type": defaults["model_type"]} if "model_type" in defaults else {}
    return {**kind, **{k: v for k, v in _TOWER.items() if k in defaults}, **parts}
