"""Nemotron-H and Nemotron-3: experts without a gate, squared ReLU, DeepSeek-V3's routing, a latent width."""

from ..types import ActivationSpec, MoESpec, SharedSpec
from .base import Config, Family, Names, StackedNames, spec_of
from .deepseek_v3 import biased_sigmoid
from .in_memory import InMemory

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("mlp_hidden_act", "relu2")
    count = config.integer("n_shared_experts")
    width = config.integer("moe_shared_expert_intermediate_size")
    return spec_of(
        config,
        biased_sigmoid(config),
        activation=ActivationSpec(kind="relu2"),
        latent_size=config.integer("moe_latent_size", default=0) or None,
        shared=SharedSpec(intermediate_size=width) if count else None,
    )


def _layers(config: Config) -> tuple[int, ...]:
    kinds = config.items("layers_block_type", "layer_types")
    pattern = config.value("hybrid_override_pattern", default="")
    if kinds is None:
        letters = ["moe" if letter == "E" else letter for letter in str(pattern)]
        kinds = letters or ["linear_attention", "moe", "full_attention", "mlp"]
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
_DEFAULTS = {
    "nemotron_h": {
        "hidden_size": 4096,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "mlp_hidden_act": "relu2",
    },
}
_IN_MEMORY = InMemory(renames=((r"\bbackbone\.", "model."),))
FAMILY = Family("nemotron_h", ("nemotron_h",), _NAMES, _spec, _layers, defaults=_DEFAULTS, in_memory=_IN_MEMORY)
