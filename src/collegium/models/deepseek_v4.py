"""DeepSeek-V4: square root of softplus as score, SwiGLU with a limit; the first layers look experts up by token id.

The published tensors have no ``model.`` in front; what transformers saves may.
"""

from __future__ import annotations

from dataclasses import replace

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import W123, Config, Family, Names, every_layer, shared_width
from .deepseek_v3 import NAMES

__all__ = ["FAMILY"]


def _hashed(config: Config, layer: int) -> bool:
    kinds = config.items("mlp_layer_types")
    count = config.integer("num_hash_layers", default=0 if kinds else 3)
    return kinds[layer] == "hash_moe" if kinds else layer < count


def _spec(config: Config, layer: int) -> MoESpec:
    config.silu()
    config.only("scoring_func", "sqrtsoftplus")
    config.only("topk_method", "noaux_tc")
    config.only("norm_topk_prob", True)
    hashed, wide = _hashed(config, layer), config.integer("moe_intermediate_size")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=wide,
        num_experts=config.integer("n_routed_experts", "num_local_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok"),
            score="sqrt_softplus",
            renormalise_eps=1e-20,
            scale=config.number("routed_scaling_factor", default=1.5),
            correction_bias=not hashed,
            hash_routing=hashed,
        ),
        activation=ActivationSpec(limit=config.number("swiglu_limit", default=10.0)),
        shared=shared_width(config, wide, "n_shared_experts", default=1),
    )


FAMILY = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    names=Names.below(
        "layers.{layer}.",
        experts="ffn.experts.",
        single=W123,
        router="ffn.gate.weight",
        correction_bias="ffn.gate.bias",
        hash_table="ffn.gate.tid2eid",
        shared=("ffn.shared_experts.w1", "ffn.shared_experts.w3", "ffn.shared_experts.w2"),
    ),
    others=(replace(NAMES, hash_table=NAMES.layer + "mlp.gate.tid2eid"),),
    spec_of=_spec,
    layers_of=every_layer,
)
