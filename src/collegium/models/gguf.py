"""Models in GGUF files: the config is the file's metadata, the names are those of the reader of such files.

Routing follows the architecture where the metadata do not say it. gpt-oss has a file of its own: it alone has biases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from ..types import ActivationSpec, MoESpec, RoutingSpec, SharedSpec
from .base import Family, Names, StackedNames, flag, integer, number

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

NAMES = Names(
    experts="blk.{layer}.ffn_exps.",
    gate="blk.{layer}.ffn_exps.{expert}.gate",
    up="blk.{layer}.ffn_exps.{expert}.up",
    down="blk.{layer}.ffn_exps.{expert}.down",
    stacked=StackedNames(gate_up="blk.{layer}.ffn_exps.gate_up", down="blk.{layer}.ffn_exps.down"),
    router_weight="blk.{layer}.ffn_gate_inp.weight",
    correction_bias="blk.{layer}.exp_probs_b.bias",
    shared=("blk.{layer}.ffn_gate_shexp", "blk.{layer}.ffn_up_shexp", "blk.{layer}.ffn_down_shexp"),
)


def _architecture(config: Mapping[str, object]) -> str:
    return str(config.get("model_type")).removeprefix(_PREFIX)


def describe_gguf(config: Mapping[str, object]) -> MoESpec:
    """Return the spec the metadata state, without activation and biases; raises ConfigError."""
    name = _architecture(config)
    rule = _ARCHITECTURES[name]
    function = integer(config, f"{name}.expert_gating_func", default=rule.score)
    if function not in _SCORES or f"{name}.swiglu_clamp_exp" in config:
        msg = (
            f"GGUF metadata: expert_gating_func is {function}, known are {_SCORES}; swiglu_clamp_exp is "
            f"{config.get(f'{name}.swiglu_clamp_exp', 'absent')!r}, allowed is absent"
        )
        raise ConfigError(msg)
    score = _SCORES[function]
    wide = integer(config, f"{name}.expert_feed_forward_length", f"{name}.feed_forward_length")
    shared = integer(config, f"{name}.expert_shared_count", default=0)
    shared_wide = integer(config, f"{name}.expert_shared_feed_forward_length", default=shared * wide)
    corrected = score == "sigmoid"
    return MoESpec(
        hidden_size=integer(config, f"{name}.embedding_length"),
        intermediate_size=wide,
        num_experts=integer(config, f"{name}.expert_count"),
        routing=RoutingSpec(
            top_k=integer(config, f"{name}.expert_used_count"),
            score=score,
            renormalise=flag(config, f"{name}.expert_weights_norm", default=rule.renormalise),
            renormalise_eps=1e-20 if corrected else 0.0,
            groups=integer(config, f"{name}.expert_group_count", default=1),
            kept_groups=integer(config, f"{name}.expert_group_used_count", default=1),
            group_score="top2_sum" if corrected else "max",
            scale=number(config, f"{name}.expert_weights_scale", default=1.0) or 1.0,
            correction_bias=corrected,
        ),
        shared=SharedSpec(intermediate_size=shared_wide) if shared else None,
        activation=ActivationSpec(),
    )


def gguf_layers(config: Mapping[str, object]) -> tuple[int, ...]:
    """Return the layers behind the leading dense ones and before those that predict further tokens."""
    name = _architecture(config)
    ahead = integer(config, f"{name}.nextn_predict_layers", default=0)
    first = integer(config, f"{name}.leading_dense_block_count", default=0)
    return tuple(range(first, integer(config, f"{name}.block_count") - ahead))


FAMILY = Family(
    name="gguf",
    model_types=tuple(_PREFIX + name for name in _ARCHITECTURES if name != "gpt-oss"),
    names=NAMES,
    describe=describe_gguf,
    moe_layers=gguf_layers,
)
