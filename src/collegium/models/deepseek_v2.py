"""DeepSeek-V2: softmax scores, whole groups kept by their best expert, no renormalisation, a shared expert."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, listed_layers, shared_width

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    config.only("topk_method", "greedy", "group_limited_greedy")
    groups, kept = config.integer("n_group", default=1), config.integer("topk_group", default=1)
    grouped = config.value("topk_method", default="greedy") == "group_limited_greedy"
    wide = config.integer("moe_intermediate_size")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=wide,
        num_experts=config.integer("n_routed_experts", "num_local_experts", "num_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok"),
            renormalise=False,
            groups=groups if grouped else 1,
            kept_groups=kept if grouped else 1,
            scale=config.number("routed_scaling_factor", default=1.0),
        ),
        shared=shared_width(config, wide, "n_shared_experts"),
    )


FAMILY = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    names=Names.below(
        shared=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    ),
    spec_of=_spec,
    layers_of=listed_layers,
)
