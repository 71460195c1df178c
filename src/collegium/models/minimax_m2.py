"""MiniMax-M2: Mixtral's names, sigmoid scores with a correction bias next to the gate."""

from ..types import MoESpec, RoutingSpec
from .base import WIDTH, Config, Family, Names, spec_of
from .mixtral import IN_MEMORY, mixtral_names

__all__ = ["FAMILY", "minimax_routing"]


def minimax_routing(config: Config, scale: float) -> RoutingSpec:
    """Return sigmoid routing with a correction bias and no epsilon; raises ConfigError."""
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    return RoutingSpec(top_k=config.top_k, score="sigmoid", scale=scale, correction_bias=True)


def _spec(config: Config, _: int) -> MoESpec:
    return spec_of(config, minimax_routing(config, 1.0), width=WIDTH)


_NAMES = mixtral_names(correction_bias="block_sparse_moe.e_score_correction_bias")
_SAVED = Names.below(correction_bias="mlp.e_score_correction_bias")
_DEFAULTS = {
    "minimax_m2": {
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "hidden_act": "silu",
    },
}
FAMILY = Family("minimax_m2", ("minimax_m2",), _NAMES, _spec, others=(_SAVED,), defaults=_DEFAULTS, in_memory=IN_MEMORY)
