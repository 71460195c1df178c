"""Models in GGUF files: the config is the metadata of the architecture, the names are those the reader gives.

Routing follows the architecture where the metadata do not say it. gpt-oss has a file of its own: it alone has biases.
"""

from collections.abc import Mapping

from ..types import ActivationSpec, MoESpec, RoutingSpec, ScoreFunction, SharedSpec
from .base import Config, Family, Names, StackedNames

__all__ = ["FAMILY", "NAMES", "gguf_layers", "gguf_spec"]

_SCORES: Mapping[int, ScoreFunction] = {1: "softmax", 2: "sigmoid", 3: "topk_softmax", 4: "sqrt_softplus"}
# what an architecture does where the metadata are silent: score function, renormalisation
_ARCHITECTURES: Mapping[str, tuple[int, bool]] = {
    "gguf:llama": (1, True),  # Mixtral
    "gguf:qwen3moe": (1, True),
    "gguf:olmoe": (1, False),
    "gguf:deepseek2": (1, False),
    "gguf:glm4moe": (2, True),
    "gguf:gpt-oss": (3, True),
}

NAMES = Names.below(
    "blk.{layer}.",
    experts="ffn_exps.",
    single=("gate", "up", "down"),
    stacked=StackedNames(gate_up="ffn_exps.gate_up", down="ffn_exps.down"),
    router="ffn_gate_inp.weight",
    correction_bias="exp_probs_b.bias",
    shared=("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
)


def gguf_spec(config: Config, _layer: int) -> MoESpec:
    """Return the spec the metadata state, with SwiGLU and without biases."""
    score, renormalise = _ARCHITECTURES[str(config.value("model_type"))]
    function = config.integer("expert_gating_func", default=score)
    if function not in _SCORES:
        raise config.wrong("expert_gating_func", function, ", ".join(f"{n} ({s})" for n, s in _SCORES.items()))
    wide = config.value("expert_feed_forward_length", default=None)
    wide = config.integer("feed_forward_length" if wide is None else "expert_feed_forward_length")
    shared = config.integer("expert_shared_count", default=0)
    shared_wide = config.integer("expert_shared_feed_forward_length", default=shared * wide)
    corrected = _SCORES[function] == "sigmoid"
    return MoESpec(
        hidden_size=config.integer("embedding_length"),
        intermediate_size=wide,
        num_experts=config.integer("expert_count"),
        routing=RoutingSpec(
            top_k=config.integer("expert_used_count"),
            score=_SCORES[function],
            renormalise=config.flag("expert_weights_norm", default=renormalise),
            renormalise_eps=1e-20 if corrected else 0.0,
            groups=config.integer("expert_group_count", default=1),
            kept_groups=config.integer("expert_group_used_count", default=1),
            group_score="top2_sum" if corrected else "max",
            scale=config.number("expert_weights_scale", default=1.0) or 1.0,
            correction_bias=corrected,
        ),
        shared=SharedSpec(intermediate_size=shared_wide) if shared else None,
        activation=ActivationSpec(),
    )


def gguf_layers(config: Config) -> tuple[int, ...]:
    """Return the layers behind the leading dense ones and before those that predict further tokens."""
    ahead = config.integer("nextn_predict_layers", default=0)
    first = config.integer("leading_dense_block_count", default=0)
    return tuple(range(first, config.integer("block_count") - ahead))


_TYPES = tuple(name for name in _ARCHITECTURES if name != "gguf:gpt-oss")
FAMILY = Family("gguf", _TYPES, NAMES, gguf_spec, gguf_layers)
