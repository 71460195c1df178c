"""Step-3: stacked experts with separate gate and up, softmax, a shared expert next to the MoE block.

The model code clamps nothing and has no correction bias; Step-3.5 and later are ``step3p7``.
"""

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names, StackedNames, projections_of, spec_of

__all__ = ["FAMILY", "STACK", "enumerated_layers"]


def enumerated_layers(config: Config, default: range) -> tuple[int, ...]:
    """Return the layers of ``mlp_layer_types`` or ``moe_layers_enum``, else those of ``default`` that exist."""
    layers = range(config.integer("num_hidden_layers"))
    kinds = config.kinds("mlp_layer_types")
    if kinds is not None:
        return tuple(i for i in layers if kinds[i] == "sparse")
    listed = config.items("moe_layers_enum")
    return tuple(i for i in layers if i in (default if listed is None else listed))


def _spec(config: Config, _: int) -> MoESpec:
    routing = RoutingSpec(top_k=config.top_k, renormalize=config.flag("norm_expert_weight"))
    return spec_of(config, routing, shared=SharedSpec(intermediate_size=config.integer("share_expert_dim")))


def _layers(config: Config) -> tuple[int, ...]:
    return enumerated_layers(config, range(4, 60))


STACK = StackedNames(gate_up="moe.gate_proj", up="moe.up_proj", down="moe.down_proj", plain=".weight")
_SHARED = projections_of("share_expert.")
_NAMES = Names.below(experts="moe.", single=(), stacked=STACK, router="moe.gate.weight", shared=_SHARED)
_TYPES = ("step3_text", "step3_vl")
_DEFAULT = {
    "hidden_size": 7168,
    "moe_intermediate_size": 5120,
    "share_expert_dim": 5120,
    "num_hidden_layers": 61,
    "moe_num_experts": 48,
    "moe_top_k": 3,
    "norm_expert_weight": False,
}
FAMILY = Family("step3", _TYPES, _NAMES, _spec, _layers, defaults=dict.fromkeys(_TYPES, _DEFAULT))
