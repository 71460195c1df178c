"""DeepSeek-V4 and V4.1: square root of softplus as score, SwiGLU with a limit; V4's first layers use hash routing.

Published tensor names do not start with ``model.``; those saved by transformers may. ``gate.bias_vl`` is the correction
bias of image tokens, which a layer does not know from text: route them in the caller and pass ``routing``.
"""

from dataclasses import replace

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import W123, Config, Family, Names, shared_width, spec_of
from .deepseek_v3 import NAMES
from .in_memory import InMemory

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    config.only("hidden_act", "silu")
    config.only("scoring_func", "sqrtsoftplus")
    config.only("topk_method", "noaux_tc")
    config.only("norm_topk_prob", True)
    # The block drafter of V4.1, which is not part of the model.
    config.passed_over("dspark_n_routed_experts", "dspark_num_experts_per_tok")
    kinds = config.kinds("mlp_layer_types")
    count = config.integer("num_hash_layers", default=0)
    hashed = kinds[layer] == "hash_moe" if kinds else layer < count
    routing = RoutingSpec(
        top_k=config.top_k,
        score="sqrt_softplus",
        renormalize_eps=1e-20,
        scale=config.number("routed_scaling_factor"),
        correction_bias=not hashed,
        hash_routing=hashed,
    )
    activation = ActivationSpec(limit=config.number("swiglu_limit"))
    shared = shared_width(config, "n_shared_experts", width=_WIDTH)
    return spec_of(config, routing, width=_WIDTH, activation=activation, shared=shared)


_NAMES = Names.below(
    "layers.{layer}.",
    experts="ffn.experts.",
    single=W123,
    router="ffn.gate.weight",
    correction_bias="ffn.gate.bias",
    hash_table="ffn.gate.tid2eid",
    shared=("ffn.shared_experts.w1", "ffn.shared_experts.w3", "ffn.shared_experts.w2"),
    outside=("ffn.gate.bias_vl",),
)
_SAVED = replace(NAMES, hash_table=NAMES.layer + "mlp.gate.tid2eid")
_WIDTH = ("moe_intermediate_size", "intermediate_size")
# The configs of V4.1, which is not in transformers, state every entry.
_DEFAULTS = {
    "deepseek_v4": {
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "num_hash_layers": 3,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
    },
}
_NULL = frozenset(("num_hash_layers",))
_TYPES = ("deepseek_v4", "deepseek_v41")
_RENAMES = (
    (r"^head\.", "lm_head."),
    (r"^embed\.", "embed_tokens."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn\.", ".self_attn."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
    (r"\.indexer\.wq_b\.", ".compressor.indexer.q_b_proj."),
    (r"\.self_attn\.wq_b\.", ".self_attn.q_b_proj."),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_(a|b)\.", r".o_\1_proj."),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
)
_IN_MEMORY = InMemory(renames=_RENAMES)
FAMILY = Family(
    "deepseek_v4",
    _TYPES,
    _NAMES,
    _spec,
    others=(_SAVED,),
    defaults=_DEFAULTS,
    null_is_default=_NULL,
    in_memory=_IN_MEMORY,
)
