"""Jamba: softmax without renormalisation; experts in the layers of a period and an offset."""

from ..types import MoESpec, RoutingSpec
from .base import WIDTH, Config, Family, Names, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    return spec_of(config, RoutingSpec(top_k=config.top_k, renormalize=False), width=WIDTH)


def _layers(config: Config) -> tuple[int, ...]:
    period = config.integer("expert_layer_period")
    offset = config.integer("expert_layer_offset")
    layers = range(config.integer("num_hidden_layers") if config.integer("num_experts", "num_local_experts") > 1 else 0)
    return tuple(i for i in layers if period > 0 and i % period == offset)


_NAMES = Names.below(experts="feed_forward.experts.", router="feed_forward.router.weight")
_DEFAULTS = {
    "jamba": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "hidden_act": "silu",
    },
}
FAMILY = Family("jamba", ("jamba",), _NAMES, _spec, _layers, defaults=_DEFAULTS)
