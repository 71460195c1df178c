"""A GGUF file as transformers sees it: the config that its metadata state, and the names of its tensors there.

transformers reads the metadata of some architectures itself, but not the width of Qwen3's experts (5.23). Sources: the
GGUF specification (ggml, ``docs/gguf.md``), the ``gguf`` package, ``tensor_mapping.py``, and the config classes.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ...checkpoint.reader import Checkpoint
from ...errors import ConfigError
from ...models.base import Config

__all__ = ["config_of", "offered"]


class _Model(NamedTuple):
    """kind: the model type of transformers. entries: its own names of metadata. router: of the router's module.

    interleaved: rows of queries and keys lie in pairs, as llama.cpp turns them, not in halves.
    """

    kind: str
    entries: Mapping[str, str]
    router: str = "gate"
    interleaved: bool = False


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
_LOCAL = {"num_local_experts": "expert_count"}
_MODELS = {
    "gguf:qwen3moe": _Model("qwen3_moe", _QWEN),
    "gguf:olmoe": _Model("olmoe", {"num_experts": "expert_count"}),
    "gguf:llama": _Model("mixtral", _LOCAL, interleaved=True),
    "gguf:gpt-oss": _Model("gpt_oss", _LOCAL | {"intermediate_size": "expert_feed_forward_length"}, "router"),
}
# What the architecture of a file always does and its metadata do not say.
_FIXED: Mapping[str, Mapping[str, object]] = {"qwen3_moe": {"norm_topk_prob": True}}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE = {
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
    """Return the model type of transformers and its config's entries; ConfigError where they are not known."""
    model, config = _model(checkpoint), Config(checkpoint.config)
    entries: dict[str, Any] = dict(_FIXED.get(model.kind, {}))
    for name, key in (_ENTRIES | dict(model.entries)).items():
        if (value := config.value(key, default=None)) is not None:
            entries[name] = value
    tensors = checkpoint.tensors
    if (layers := config.integer("block_count")) > len(tensors):  # transformers would begin to build them
        raise config.wrong("block_count", layers, f"as many as there are tensors, {len(tensors)}, at most")
    entries["vocab_size"] = tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0
    entries["tie_word_embeddings"] = "output.weight" not in tensors
    entries |= {name: config.value(name, default=None) for name in ("bos_token_id", "eos_token_id")}
    entries["rope_parameters"] = _rope(config)
    return model.kind, entries


def _rope(config: Config) -> dict[str, object]:
    kind = config.value("rope.scaling.type", default="none")
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.number("rope.freq_base", default=10000.0)}
    if kind == "yarn":
        most = config.integer("rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": most, "truncate": False}
    elif kind != "none":
        raise config.wrong("rope.scaling.type", kind, "none, yarn")
    return rope if kind == "none" else rope | {"factor": config.number("rope.scaling.factor")}


def offered(checkpoint: Checkpoint, name: str, read: Callable[[], Tensor]) -> tuple[str, Callable[[], Tensor]]:
    """Return the name by which transformers asks for a tensor or module, and what reads it with its order of rows.

    Names that are not known stay as they are, and so does everything of a checkpoint that is no GGUF file.
    """
    if not checkpoint.is_gguf:
        return name, read
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)(\.\w+|)", name)
    if match is None:
        head, dot, suffix = name.partition(".")
        return _WHOLE.get(head, head) + dot + suffix, read
    model, (layer, kind, suffix) = _model(checkpoint), match.groups()
    inside = (_INSIDE | {"ffn_gate_inp": f"mlp.{model.router}"}).get(kind)
    if kind == "attn_sinks":
        inside, suffix = "self_attn.sinks", ""
    if inside is None:
        return name, read
    if model.interleaved and kind in ("attn_q", "attn_k"):
        heads = Config(checkpoint.config).integer(f"attention.head_count{'_kv' * (kind == 'attn_k')}")
        read = partial(_in_halves, read, heads)
    return f"model.layers.{layer}.{inside}{suffix}", read


def _in_halves(read: Callable[[], Tensor], heads: int) -> Tensor:
    rows = read()
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _model(checkpoint: Checkpoint) -> _Model:
    kind = str(checkpoint.config.get("model_type"))
    if kind not in _MODELS:
        known = ", ".join(name.removeprefix("gguf:") for name in _MODELS)
        raise ConfigError(
            f"{checkpoint.path}: a GGUF file of the architecture {kind.removeprefix('gguf:')!r}; whole models are "
            f"loaded from GGUF files of {known}. Load its layers with load_layer(), or give the folder of the model it "
            "was made from"
        )
    return _MODELS[kind]
