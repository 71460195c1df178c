"""Gemma-4: the router reads a normalised, scaled input of its own; every expert's weight has a factor; gated GELU.

The layer's dense MLP has an input and norms of its own and stays with the caller, like the norm of the experts'
input: call the layer with ``router_input``.
"""

from __future__ import annotations

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import Config, Family, Names, every_layer

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.only("hidden_activation", "gelu_pytorch_tanh")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size", "expert_intermediate_size"),
        num_experts=config.integer("num_experts"),
        routing=RoutingSpec(
            top_k=config.integer("top_k_experts"),
            input_norm_eps=config.number("rms_norm_eps", default=1e-6),
            expert_scale=True,
        ),
        activation=ActivationSpec(kind="geglu_tanh"),
    )


def _layers(config: Config) -> tuple[int, ...]:
    return every_layer(config) if config.flag("enable_moe_block", default=False) else ()


FAMILY = Family(
    name="gemma4",
    model_types=("gemma4", "gemma4_text"),
    names=Names.below(
        "model.language_model.layers.{layer}.",
        experts="experts.",
        router="router.proj.weight",
        router_scale="router.scale",
        expert_scale="router.per_expert_scale",
    ),
    spec_of=_spec,
    layers_of=_layers,
)
