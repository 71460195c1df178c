"""Phi-3.5-MoE: Mixtral's experts behind sparse-mixer routing, two experts chosen one after the other."""

from __future__ import annotations

from dataclasses import replace

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, every_layer
from .mixtral import NAMES, spec

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    jitter = config.number("router_jitter_noise", default=0.01)
    routing = RoutingSpec(
        top_k=config.integer("num_experts_per_tok"), score="sparsemixer", renormalise=False, jitter=jitter
    )
    return replace(spec(config, layer), routing=routing)


FAMILY = Family(
    name="phimoe",
    model_types=("phimoe",),
    names=NAMES,
    others=(Names.below(router="mlp.router.weight"),),
    spec_of=_spec,
    layers_of=every_layer,
)
