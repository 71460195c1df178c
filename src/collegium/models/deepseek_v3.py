"""DeepSeek-V3, V3.2 and Kimi-K2: sigmoid scores with a correction bias, grouped top-k, a shared expert.

Layers from ``num_hidden_layers`` on hold multi-token prediction and are not described here.
"""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, listed_layers, shared_width

__all__ = ["FAMILY", "NAMES", "biased_sigmoid", "spec"]


def biased_sigmoid(config: Config) -> RoutingSpec:
    """Return the routing of DeepSeek-V3 and those that took it over; raises ConfigError."""
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    return RoutingSpec(
        top_k=config.integer("num_experts_per_tok", "num_experts_per_token"),
        score="sigmoid",
        renormalise=config.flag("norm_topk_prob", "moe_renormalize", default=True),
        renormalise_eps=1e-20,
        groups=config.integer("n_group", "num_expert_group", default=1),
        kept_groups=config.integer("topk_group", default=1),
        group_score="top2_sum",
        scale=config.number("routed_scaling_factor", default=1.0),
        correction_bias=True,
    )


def spec(config: Config, layer: int) -> MoESpec:
    """Return the spec of a DeepSeek-V3 layer; raises ConfigError."""
    del layer
    config.silu()
    wide = config.integer("moe_intermediate_size")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=wide,
        num_experts=config.integer("n_routed_experts", "num_local_experts", "num_experts"),
        routing=biased_sigmoid(config),
        shared=shared_width(config, wide, "n_shared_experts"),
    )


NAMES = Names.below(
    correction_bias="mlp.gate.e_score_correction_bias",
    shared=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
)

FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"),
    names=NAMES,
    spec_of=spec,
    layers_of=listed_layers,
)
