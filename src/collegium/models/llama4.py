"""Llama-4: the router's weight, a sigmoid of the logit, multiplies the expert's input; a shared expert."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names, StackedNames, projections_of, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    routing = RoutingSpec(top_k=config.top_k, score="sigmoid", renormalise=False, weight_on_input=True)
    shared = SharedSpec(intermediate_size=config.integer("intermediate_size"))
    return spec_of(config, routing, wide="intermediate_size", shared=shared)


def _layers(config: Config) -> tuple[int, ...]:
    step, listed = config.integer("interleave_moe_layer_step", default=1), config.items("moe_layers")
    layers = range(config.integer("num_hidden_layers"))
    return tuple(i for i in layers if (step > 0 and (i + 1) % step == 0 if listed is None else i in listed))


_STACK = StackedNames(
    gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj", transposed=True
)
_NAMES = Names.below(
    experts="feed_forward.experts.",
    stacked=_STACK,
    router="feed_forward.router.weight",
    shared=projections_of("feed_forward.shared_expert."),
)
FAMILY = Family("llama4", ("llama4", "llama4_text"), _NAMES, _spec, _layers)
