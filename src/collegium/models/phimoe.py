"""Phi-3.5-MoE: Mixtral's experts behind sparse-mixer routing, two experts chosen one after the other."""

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, spec_of
from .mixtral import NAMES

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    jitter = config.number("router_jitter_noise", default=0.01)
    routing = RoutingSpec(top_k=config.top_k, score="sparsemixer", renormalise=False, jitter=jitter)
    return spec_of(config, routing, wide="intermediate_size")


FAMILY = Family("phimoe", ("phimoe",), NAMES, _spec, others=(Names.below(router="mlp.router.weight"),))
