"""Snowflake Arctic: Mixtral's experts in every n-th layer, renormalised when more than one is chosen.

The dense residual MLP of a layer has an input of its own and stays with the caller.
"""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import W123, Config, Family, Names

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    config.passed_over("moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity")
    config.passed_over("moe_token_dropping", "enable_expert_tensor_parallelism", "parallel_attn_mlp_res")
    top_k = config.integer("num_experts_per_tok")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_experts=config.integer("num_local_experts"),
        routing=RoutingSpec(top_k=top_k, renormalise=top_k > 1),
    )


def _layers(config: Config) -> tuple[int, ...]:
    step = config.integer("moe_layer_frequency", default=2)
    return tuple(i for i in range(config.integer("num_hidden_layers")) if step > 0 and (i + 1) % step == 0)


FAMILY = Family(
    name="arctic",
    model_types=("arctic",),
    names=Names.below(experts="block_sparse_moe.experts.", single=W123, router="block_sparse_moe.gate.weight"),
    spec_of=_spec,
    layers_of=_layers,
)
