"""Mixtral: softmax over all experts, always renormalised, every layer is MoE."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import W123, Config, Family, Names, every_layer

__all__ = ["FAMILY", "NAMES", "spec"]


def spec(config: Config, layer: int) -> MoESpec:
    """Return the spec of a Mixtral layer; raises ConfigError."""
    del layer
    config.silu()
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_experts=config.integer("num_local_experts", "num_experts"),
        routing=RoutingSpec(top_k=config.integer("num_experts_per_tok")),
    )


NAMES = Names.below(experts="block_sparse_moe.experts.", single=W123, router="block_sparse_moe.gate.weight")

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    names=NAMES,
    others=(Names.below(),),
    spec_of=spec,
    layers_of=every_layer,
)
