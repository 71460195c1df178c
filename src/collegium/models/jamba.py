"""Jamba: softmax without renormalisation; experts in the layers of a period and an offset."""

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    return spec_of(config, RoutingSpec(top_k=config.top_k, renormalise=False), wide="intermediate_size")


def _layers(config: Config) -> tuple[int, ...]:
    period = config.integer("expert_layer_period", default=2)
    offset = config.integer("expert_layer_offset", default=1)
    layers = range(config.integer("num_hidden_layers") if config.integer("num_experts") > 1 else 0)
    return tuple(i for i in layers if period > 0 and i % period == offset)


_NAMES = Names.below(experts="feed_forward.experts.", router="feed_forward.router.weight")
FAMILY = Family("jamba", ("jamba",), _NAMES, _spec, _layers)
