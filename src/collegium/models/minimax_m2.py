"""MiniMax-M2: Mixtral's names, sigmoid scores with a correction bias that lies beside the gate."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import W123, Config, Family, Names, every_layer

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_experts=config.integer("num_local_experts", "num_experts"),
        routing=RoutingSpec(top_k=config.integer("num_experts_per_tok"), score="sigmoid", correction_bias=True),
    )


FAMILY = Family(
    name="minimax_m2",
    model_types=("minimax_m2",),
    names=Names.below(
        experts="block_sparse_moe.experts.",
        single=W123,
        router="block_sparse_moe.gate.weight",
        correction_bias="block_sparse_moe.e_score_correction_bias",
    ),
    others=(Names.below(correction_bias="mlp.e_score_correction_bias"),),
    spec_of=_spec,
    layers_of=every_layer,
)
