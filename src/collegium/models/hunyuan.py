"""Hunyuan-MoE: softmax, renormalised; sizes may be lists with one entry a layer; a shared expert."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names, every_layer

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    config.silu()
    wide = config.per_layer("moe_intermediate_size", layer, default=config.integer("intermediate_size"))
    shared = config.per_layer("num_shared_expert", layer, default=1)
    if wide != config.integer("intermediate_size"):
        raise config.wrong("moe_intermediate_size", wide, "intermediate_size, the width the model code uses")
    config.only("norm_topk_prob", True)
    config.only("moe_layer_num_skipped", 0)
    config.only("use_mixed_mlp_moe", True, False)
    config.passed_over("moe_drop_tokens", "moe_random_routing_dropped_token")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=wide,
        num_experts=config.per_layer("num_experts", layer),
        routing=RoutingSpec(top_k=config.per_layer("moe_topk", layer)),
        shared=SharedSpec(intermediate_size=shared * wide) if shared else None,
    )


FAMILY = Family(
    name="hunyuan",
    model_types=("hunyuan_v1_moe",),
    names=Names.below(
        router="mlp.gate.wg.weight",
        shared=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"),
    ),
    spec_of=_spec,
    layers_of=every_layer,
)
