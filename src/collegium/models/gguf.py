"""Models in GGUF files: the config is the file's metadata, the names are those of the reader of such files.

Routing follows the architecture where the metadata do not say it. gpt-oss has a file of its own: it alone has biases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from ..types import ActivationSpec, MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names, StackedNames

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..types import ScoreFunction

__all__ = ["FAMILY", "NAMES", "describe_gguf", "gguf_layers"]

_PREFIX = "gguf:"
_SCORES: Mapping[int, ScoreFunction] = {1: "softmax", 2: "sigmoid", 3: "topk_softmax", 4: "sqrt_softplus"}


class _Routing(NamedTuple):
    """What an architecture does where the metadata are silent: score function and renormalisation."""

    score: int
    renormalise: bool


_ARCHITECTURES = {
    "llama": _Routing(1, True),  # Mixtral
    "qwen3moe": _Routing(1, True),
    "olmoe": _Routing(1, False),
    "deepseek2": _Routing(1, False),
    "glm4moe": _Routing(2, True),
    "gpt-oss": _Routing(3, True),
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


def _architecture(config: Config) -> str:
    return str(config.value("model_type")).removeprefix(_PREFIX)


def describe_gguf(config: Config, _: int) -> MoESpec:
    """Return the spec the metadata state, without activation and biases; raises ConfigError."""
    config.passed_over(*config.entries)  # every key holds the architecture's name; what changes an expert is read here
    name = _architecture(config)
    rule = _ARCHITECTURES[name]
    function = config.integer(f"{name}.expert_gating_func", default=rule.score)
    if function not in _SCORES or f"{name}.swiglu_clamp_exp" in config.entries:
        msg = (
            f"GGUF metadata: expert_gating_func is {function}, known are {_SCORES}; swiglu_clamp_exp is "
            f"{config.entries.get(f'{name}.swiglu_clamp_exp', 'absent')!r}, allowed is absent"
        )
        raise ConfigError(msg)
    score = _SCORES[function]
    wide = config.integer(f"{name}.expert_feed_forward_length", f"{name}.feed_forward_length")
    shared = config.integer(f"{name}.expert_shared_count", default=0)
    shared_wide = config.integer(f"{name}.expert_shared_feed_forward_length", default=shared * wide)
    corrected = score == "sigmoid"
    return MoESpec(
        hidden_size=config.integer(f"{name}.embedding_length"),
        intermediate_size=wide,
        num_experts=config.integer(f"{name}.expert_count"),
        routing=RoutingSpec(
            top_k=config.integer(f"{name}.expert_used_count"),
            score=score,
            renormalise=config.flag(f"{name}.expert_weights_norm", default=rule.renormalise),
            renormalise_eps=1e-20 if corrected else 0.0,
            groups=config.integer(f"{name}.expert_group_count", default=1),
            kept_groups=config.integer(f"{name}.expert_group_used_count", default=1),
            group_score="top2_sum" if corrected else "max",
            scale=config.number(f"{name}.expert_weights_scale", default=1.0) or 1.0,
            correction_bias=corrected,
        ),
        shared=SharedSpec(intermediate_size=shared_wide) if shared else None,
        activation=ActivationSpec(),
    )


def gguf_layers(config: Config) -> tuple[int, ...]:
    """Return the layers behind the leading dense ones and before those that predict further tokens."""
    name = _architecture(config)
    ahead = config.integer(f"{name}.nextn_predict_layers", default=0)
    first = config.integer(f"{name}.leading_dense_block_count", default=0)
    return tuple(range(first, config.integer(f"{name}.block_count") - ahead))


_TYPES = tuple(_PREFIX + name for name in _ARCHITECTURES if name != "gpt-oss")
FAMILY = Family("gguf", _TYPES, NAMES, describe_gguf, gguf_layers)
