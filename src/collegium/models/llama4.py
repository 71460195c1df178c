"""Llama-4: the router's weight, a sigmoid of the logit, multiplies the expert's input; a shared expert."""

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import WIDTH, Config, Family, Names, StackedNames, each_nth, every_layer, projections_of, spec_of
from .in_memory import InMemory

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    routing = RoutingSpec(top_k=config.top_k, score="sigmoid", renormalize=False, weight_on_input=True)
    shared = SharedSpec(intermediate_size=config.integer("intermediate_size"))
    return spec_of(config, routing, width=WIDTH, shared=shared)


def _layers(config: Config) -> tuple[int, ...]:
    listed = config.items("moe_layers")
    stepped = each_nth(config, config.integer("interleave_moe_layer_step"))
    return stepped if listed is None else tuple(i for i in every_layer(config) if i in listed)


_STACK = StackedNames(
    gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj", transposed=True
)
_NAMES = Names.below(
    experts="feed_forward.experts.",
    stacked=_STACK,
    router="feed_forward.router.weight",
    shared=projections_of("feed_forward.shared_expert."),
)
_TYPES = ("llama4", "llama4_text")
_DEFAULT = {
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "hidden_act": "silu",
}
_IN_MEMORY = InMemory(transposed=True)
FAMILY = Family(
    "llama4", _TYPES, _NAMES, _spec, _layers, defaults=dict.fromkeys(_TYPES, _DEFAULT), in_memory=_IN_MEMORY
)
