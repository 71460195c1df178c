"""Step-3: stacked experts, gate and up in stacks of their own, softmax, a shared expert beside the MoE block.

The model code clamps nothing and has no correction bias; Step-3.5 and later are ``step3p7``.
"""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names, StackedNames

__all__ = ["FAMILY", "SHARED", "STACK", "enumerated_layers"]


def enumerated_layers(config: Config, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers ``moe_layers_enum`` or ``mlp_layer_types`` name, else those of ``default`` that exist."""
    layers, kinds = range(config.integer("num_hidden_layers")), config.items("mlp_layer_types")
    if kinds is not None:
        return tuple(i for i in layers if kinds[i] == "sparse")
    listed = config.items("moe_layers_enum")
    return tuple(i for i in layers if i in (default if listed is None else listed))


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        num_experts=config.integer("moe_num_experts"),
        routing=RoutingSpec(
            top_k=config.integer("moe_top_k"), renormalise=config.flag("norm_expert_weight", default=False)
        ),
        shared=SharedSpec(intermediate_size=config.integer("share_expert_dim")),
    )


def _layers(config: Config) -> tuple[int, ...]:
    return enumerated_layers(config, tuple(range(4, 60)))


STACK = StackedNames(gate_up="moe.gate_proj", up="moe.up_proj", down="moe.down_proj", plain=".weight")
SHARED = ("share_expert.gate_proj", "share_expert.up_proj", "share_expert.down_proj")

FAMILY = Family(
    name="step3",
    model_types=("step3_text", "step3_vl"),
    names=Names.below(experts="moe.", single=(), stacked=STACK, router="moe.gate.weight", shared=SHARED),
    spec_of=_spec,
    layers_of=_layers,
)
