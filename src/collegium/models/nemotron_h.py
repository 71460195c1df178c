"""Nemotron-H and Nemotron-3: experts without a gate, squared ReLU, DeepSeek-V3's routing; large ones are latent."""

from ..types import ActivationSpec, MoESpec, SharedSpec
from .base import Config, Family, Names, StackedNames, spec_of
from .deepseek_v3 import biased_sigmoid

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("mlp_hidden_act", "relu2")
    count, wide = config.integer("n_shared_experts", default=1), config.integer("moe_shared_expert_intermediate_size")
    return spec_of(
        config,
        biased_sigmoid(config),
        activation=ActivationSpec(kind="relu2"),
        latent_size=config.integer("moe_latent_size", default=0) or None,
        shared=SharedSpec(intermediate_size=wide) if count else None,
    )


def _layers(config: Config) -> tuple[int, ...]:
    kinds = config.items("layers_block_type") or config.items("layer_types")
    if kinds is None:
        kinds = ["moe" if letter == "E" else letter for letter in str(config.value("hybrid_override_pattern"))]
    return tuple(i for i, kind in enumerate(kinds) if kind == "moe")


_NAMES = Names.below(
    "backbone.layers.{layer}.",
    experts="mixer.experts.",
    single=("up_proj", "down_proj"),
    stacked=StackedNames(gate_up="mixer.experts.up_proj", down="mixer.experts.down_proj"),
    router="mixer.gate.weight",
    correction_bias="mixer.gate.e_score_correction_bias",
    shared=("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
    latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
)
FAMILY = Family("nemotron_h", ("nemotron_h",), _NAMES, _spec, _layers)
