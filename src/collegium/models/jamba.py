"""Jamba: softmax without renormalisation; experts in the layers of a period and an offset."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_experts=config.integer("num_experts", "num_local_experts"),
        routing=RoutingSpec(top_k=config.integer("num_experts_per_tok"), renormalise=False),
    )


def _layers(config: Config) -> tuple[int, ...]:
    period = config.integer("expert_layer_period", default=2)
    offset = config.integer("expert_layer_offset", default=1)
    layers = range(config.integer("num_hidden_layers") if config.integer("num_experts") > 1 else 0)
    return tuple(i for i in layers if period > 0 and i % period == offset)


FAMILY = Family(
    name="jamba",
    model_types=("jamba",),
    names=Names.below(experts="feed_forward.experts.", router="feed_forward.router.weight"),
    spec_of=_spec,
    layers_of=_layers,
)
