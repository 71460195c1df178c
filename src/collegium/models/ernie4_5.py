"""ERNIE-4.5: softmax with a correction bias; the sum of the chosen weights has a floor; a shared expert."""

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, each_nth, projections_of, shared_width, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("use_bias", False)
    config.only("moe_gate", "topk")
    config.only("moe_use_aux_free", True)
    floor = config.number("moe_norm_min")
    routing = RoutingSpec(top_k=config.top_k, renormalize_floor=floor, correction_bias=True)
    return spec_of(config, routing, shared=shared_width(config, "moe_num_shared_experts"))


def _layers(config: Config) -> tuple[int, ...]:
    first = config.integer("moe_layer_start_index")
    last = config.integer("moe_layer_end_index")
    layers = each_nth(config, config.integer("moe_layer_interval"))
    return tuple(i for i in layers if first <= i and (last == -1 or i <= last))


_SHARED = projections_of("mlp.shared_experts.")
_NAMES = Names.below(correction_bias="mlp.moe_statics.e_score_correction_bias", shared=_SHARED)
_SAVED = Names.below(correction_bias="mlp.gate.moe_statics.e_score_correction_bias", shared=_SHARED)
_DEFAULTS = {
    "ernie4_5_moe": {
        "hidden_size": 2560,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 28,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
        "use_bias": False,
        "hidden_act": "silu",
    },
}
FAMILY = Family("ernie4_5", ("ernie4_5_moe",), _NAMES, _spec, _layers, (_SAVED,), _DEFAULTS)
