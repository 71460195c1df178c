"""Hunyuan-MoE: softmax, renormalised; sizes may be lists with one entry per layer; a shared expert."""

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import WIDTH, Config, Family, Names, projections_of, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    intermediate_size = config.integer("intermediate_size")
    moe_size = config.per_layer("moe_intermediate_size", layer=layer, default=intermediate_size)
    if moe_size != intermediate_size:
        raise config.wrong(
            "moe_intermediate_size", moe_size, f"intermediate_size={intermediate_size}, the width the model code uses"
        )
    config.only("norm_topk_prob", True)
    config.only("moe_layer_num_skipped", 0)
    config.passed_over("use_mixed_mlp_moe", "moe_drop_tokens", "moe_random_routing_dropped_token")
    count = config.per_layer("num_shared_expert", layer=layer, default=1)
    shared = SharedSpec(intermediate_size=count * intermediate_size) if count else None
    routing = RoutingSpec(top_k=config.per_layer("moe_topk", "num_experts_per_tok", layer=layer))
    return spec_of(config, routing, width=WIDTH, shared=shared)


_NAMES = Names.below(router="mlp.gate.wg.weight", shared=projections_of("mlp.shared_mlp."))
_DEFAULTS = {
    "hunyuan_v1_moe": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_experts": 1,
        "moe_topk": 1,
        "hidden_act": "silu",
    },
}
FAMILY = Family("hunyuan", ("hunyuan_v1_moe",), _NAMES, _spec, defaults=_DEFAULTS)
