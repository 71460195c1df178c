"""Translate a GGUF file for transformers: config entries from its metadata, and tensor names.

transformers reads the metadata of some architectures itself, but without the width of Qwen3's experts (5.23). Sources:
the GGUF specification (ggml, ``docs/gguf.md``), the ``gguf`` package, ``tensor_mapping.py``, and the config classes.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ...checkpoint.reader import Checkpoint
from ...errors import ConfigError
from ...models.base import Config
from ...models.gguf import gguf_spec

__all__ = ["config_of", "transformers_tensor"]


class _Model(NamedTuple):
    """One architecture.

    kind: transformers' model type. entries: metadata keys of additional config entries. router: name of the router
    module. interleaved: whether query and key rows are stored in llama.cpp's pairs, which transformers needs as halves.
    names: further modules of a layer, by their names in the file. bias: path of the correction bias below a layer.
    """

    kind: str
    entries: Mapping[str, str]
    router: str = "gate"
    interleaved: bool = False
    names: Mapping[str, str] = {}
    bias: str = ""


_ENTRIES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "num_experts_per_tok": "expert_used_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
}
_QWEN = {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
_SHARED_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GLM_NAMES = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLM = {
    "n_routed_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
}
_LOCAL = {"num_local_experts": "expert_count"}
_MODELS = {
    "gguf:qwen3moe": _Model("qwen3_moe", _QWEN),
    "gguf:qwen2moe": _Model("qwen2_moe", _QWEN, names=_SHARED_NAMES),
    "gguf:olmoe": _Model("olmoe", {"num_experts": "expert_count"}),
    "gguf:llama": _Model("mixtral", _LOCAL, interleaved=True),
    "gguf:gpt-oss": _Model("gpt_oss", _LOCAL | {"intermediate_size": "expert_feed_forward_length"}, "router"),
    "gguf:glm4moe": _Model("glm4_moe", _GLM, names=_GLM_NAMES, bias="mlp.gate.e_score_correction_bias"),
    "gguf:minimax-m2": _Model(
        "minimax_m2",
        _LOCAL | {"intermediate_size": "expert_feed_forward_length"},
        bias="mlp.e_score_correction_bias",
    ),
}
# Architectures whose layers load, and why transformers has no whole model for them.
_LAYERS_ONLY = {
    "gguf:bailingmoe2": "transformers has no class of Ling 2",
    "gguf:deepseek2": "the halves of the key and value projection of its files are not joined",
    "gguf:kimi-linear": "the halves of the key and value projection of its files are not joined",
}
# Config entries that follow from the architecture and are not in the metadata.
_IMPLIED_ENTRIES: Mapping[str, Mapping[str, object]] = {"qwen3_moe": {"norm_topk_prob": True}}
_TOP_LEVEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def config_of(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return transformers' model type and config entries; raises ConfigError for an unsupported architecture."""
    model = _model(checkpoint)
    config = Config(checkpoint.config, checkpoint.config.get("model_type"))
    entries: dict[str, Any] = dict(_IMPLIED_ENTRIES.get(model.kind, {}))
    for name, key in (_ENTRIES | dict(model.entries)).items():
        value = config.value(key, default=None)
        if value is not None:
            entries[name] = value
    if model.kind == "qwen2_moe":  # files may lack the widths
        spec = gguf_spec(config, 0)
        shared_width = 0 if spec.shared is None else spec.shared.intermediate_size
        entries["moe_intermediate_size"] = spec.intermediate_size
        entries["shared_expert_intermediate_size"] = shared_width
        entries["norm_topk_prob"] = spec.routing.renormalize
    if model.bias:
        entries |= _sigmoid_entries(config, model.kind, checkpoint)
    tensors = checkpoint.tensors
    layers = config.integer("block_count")
    if layers > len(tensors):  # checked here, before transformers builds a huge model
        raise config.wrong("block_count", layers, f"at most the number of tensors, {len(tensors)}")
    entries["vocab_size"] = tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0
    entries["tie_word_embeddings"] = "output.weight" not in tensors
    for name in ("bos_token_id", "eos_token_id"):
        entries[name] = config.value(name, default=None)
    entries["rope_parameters"] = _rope(config)
    rotated = config.value("rope.dimension_count", default=None)
    if model.bias and rotated is not None and entries.get("head_dim"):
        entries["rope_parameters"]["partial_rotary_factor"] = (
            config.integer("rope.dimension_count") / entries["head_dim"]
        )
    return model.kind, entries


def _sigmoid_entries(config: Config, kind: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the entries of a model whose class computes sigmoid scores with a correction bias, by llama.cpp's rules.

    Raises ConfigError for routing that the class does not compute.
    """
    routing = gguf_spec(config, 0).routing
    if routing.score != "sigmoid":
        raise config.wrong("expert_gating_func", routing.score, f"2 (sigmoid), which transformers' {kind} computes")
    if kind == "minimax_m2":
        if not routing.renormalize or routing.scale != 1.0:
            found = f"renormalize {routing.renormalize}, scale {routing.scale}"
            raise config.wrong("expert_weights_norm", found, f"true and a scale of 1, as transformers' {kind} computes")
        return {}
    entries: dict[str, Any] = {
        "norm_topk_prob": routing.renormalize,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.groups,
        "topk_group": routing.topk_groups,
        "num_hidden_layers": config.integer("block_count") - config.integer("nextn_predict_layers", default=0),
        "attention_bias": "blk.0.attn_q.bias" in checkpoint.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in checkpoint.tensors,
    }
    if config.value("expert_shared_count", default=None) is None:
        entries["n_shared_experts"] = 0
    return entries


def _rope(config: Config) -> dict[str, object]:
    kind = config.value("rope.scaling.type", default="none")
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.number("rope.freq_base", default=10000.0)}
    if kind == "yarn":
        original_length = config.integer("rope.scaling.original_context_length")
        rope.update(rope_type="yarn", original_max_position_embeddings=original_length, truncate=False)
    elif kind != "none":
        raise config.wrong("rope.scaling.type", kind, "none, yarn")
    return rope if kind == "none" else rope | {"factor": config.number("rope.scaling.factor")}


def transformers_tensor(
    checkpoint: Checkpoint, name: str, read: Callable[[], Tensor]
) -> tuple[str, Callable[[], Tensor]]:
    """Return transformers' name of a tensor or module, and a reader that returns its rows in transformers' order.

    Unknown names, and all tensors of a checkpoint that is not a GGUF file, are returned unchanged.
    """
    if not checkpoint.is_gguf:
        return name, read
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)(\.\w+|)", name)
    if match is None:
        first, dot, rest = name.partition(".")
        return _TOP_LEVEL_NAMES.get(first, first) + dot + rest, read
    model = _model(checkpoint)
    layer, kind, suffix = match.groups()
    if kind == "attn_sinks":
        return f"model.layers.{layer}.self_attn.sinks", read
    if kind == "exp_probs_b" and model.bias:
        return f"model.layers.{layer}.{model.bias}", read
    inside = f"mlp.{model.router}" if kind == "ffn_gate_inp" else model.names.get(kind, _LAYER_NAMES.get(kind))
    if inside is None:
        return name, read
    if model.interleaved and kind in ("attn_q", "attn_k"):
        heads = Config(checkpoint.config).integer(f"attention.head_count{'_kv' * (kind == 'attn_k')}")
        read = partial(_deinterleave_heads, read, heads)
    return f"model.layers.{layer}.{inside}{suffix}", read


def _deinterleave_heads(read: Callable[[], Tensor], heads: int) -> Tensor:
    """Return the rows of each head as two halves instead of pairs."""
    rows = read()
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _model(checkpoint: Checkpoint) -> _Model:
    kind = str(checkpoint.config.get("model_type"))
    if kind not in _MODELS:
        supported = ", ".join(name.removeprefix("gguf:") for name in _MODELS)
        reason = f" ({_LAYERS_ONLY[kind]})" if kind in _LAYERS_ONLY else ""
        raise ConfigError(
            f"{checkpoint.path}: a GGUF file of the architecture {kind.removeprefix('gguf:')!r}{reason}; whole models "
            f"are loaded from GGUF files of {supported}. Load its layers with load_layer(), or give the folder of the "
            "original model"
        )
    return _MODELS[kind]
