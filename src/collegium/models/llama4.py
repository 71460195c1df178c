"""Llama-4: the router's weight, a sigmoid of the logit, multiplies the expert's input; a shared expert."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names, StackedNames

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    wide = config.integer("intermediate_size")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=wide,
        num_experts=config.integer("num_local_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok"), score="sigmoid", renormalise=False, weight_on_input=True
        ),
        shared=SharedSpec(intermediate_size=wide),
    )


def _layers(config: Config) -> tuple[int, ...]:
    step, listed = config.integer("interleave_moe_layer_step", default=1), config.items("moe_layers")
    layers = range(config.integer("num_hidden_layers"))
    if listed is not None:
        return tuple(i for i in layers if i in listed)
    return tuple(i for i in layers if step > 0 and (i + 1) % step == 0)


FAMILY = Family(
    name="llama4",
    model_types=("llama4", "llama4_text"),
    names=Names.below(
        experts="feed_forward.experts.",
        stacked=StackedNames(
            gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj", transposed=True
        ),
        router="feed_forward.router.weight",
        shared=(
            "feed_forward.shared_expert.gate_proj",
            "feed_forward.shared_expert.up_proj",
            "feed_forward.shared_expert.down_proj",
        ),
    ),
    spec_of=_spec,
    layers_of=_layers,
)
