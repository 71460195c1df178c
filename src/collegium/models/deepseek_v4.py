"""DeepSeek-V4: square root of softplus as score, SwiGLU with a limit; the first layers look experts up by token id.

The published tensors have no ``model.`` in front; what transformers saves may.
"""

from dataclasses import replace

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import W123, Config, Family, Names, shared_width, spec_of
from .deepseek_v3 import NAMES

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    config.only("hidden_act", "silu")
    config.only("scoring_func", "sqrtsoftplus")
    config.only("topk_method", "noaux_tc")
    config.only("norm_topk_prob", True)
    kinds, count = config.kinds("mlp_layer_types"), config.integer("num_hash_layers", default=3)
    hashed = kinds[layer] == "hash_moe" if kinds else layer < count
    routing = RoutingSpec(
        top_k=config.top_k,
        score="sqrt_softplus",
        renormalise_eps=1e-20,
        scale=config.number("routed_scaling_factor", default=1.5),
        correction_bias=not hashed,
        hash_routing=hashed,
    )
    activation = ActivationSpec(limit=config.number("swiglu_limit", default=10.0))
    shared = shared_width(config, "n_shared_experts", default=1)
    return spec_of(config, routing, activation=activation, shared=shared)


_NAMES = Names.below(
    "layers.{layer}.",
    experts="ffn.experts.",
    single=W123,
    router="ffn.gate.weight",
    correction_bias="ffn.gate.bias",
    hash_table="ffn.gate.tid2eid",
    shared=("ffn.shared_experts.w1", "ffn.shared_experts.w3", "ffn.shared_experts.w2"),
)
_SAVED = replace(NAMES, hash_table=NAMES.layer + "mlp.gate.tid2eid")
FAMILY = Family("deepseek_v4", ("deepseek_v4",), _NAMES, _spec, others=(_SAVED,))
