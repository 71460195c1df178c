"""ERNIE-4.5: softmax with a correction bias; the sum of the chosen weights has a floor; a shared expert."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, shared_width

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    config.only("use_bias", False)
    config.only("moe_gate", "topk")
    config.only("moe_use_aux_free", True)
    wide = config.integer("moe_intermediate_size")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=wide,
        num_experts=config.integer("moe_num_experts", "num_experts"),
        routing=RoutingSpec(
            top_k=config.integer("moe_k", "num_experts_per_tok"),
            renormalise_floor=config.number("moe_norm_min", default=1e-12),
            correction_bias=True,
        ),
        shared=shared_width(config, wide, "moe_num_shared_experts"),
    )


def _layers(config: Config) -> tuple[int, ...]:
    count, step = config.integer("num_hidden_layers"), config.integer("moe_layer_interval", default=1)
    first, last = config.integer("moe_layer_start_index", default=1), config.integer("moe_layer_end_index", default=-1)
    last = count - 1 if last == -1 else last
    return tuple(i for i in range(count) if step > 0 and (i + 1) % step == 0 and first <= i <= last)


_SHARED = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")

FAMILY = Family(
    name="ernie4_5",
    model_types=("ernie4_5_moe",),
    names=Names.below(correction_bias="mlp.moe_statics.e_score_correction_bias", shared=_SHARED),
    others=(Names.below(correction_bias="mlp.gate.moe_statics.e_score_correction_bias", shared=_SHARED),),
    spec_of=_spec,
    layers_of=_layers,
)
