"""LFM2-MoE: sigmoid scores with a correction bias, renormalised with an epsilon of 1e-6; no shared expert."""

from ..types import MoESpec, RoutingSpec
from .base import W123, Config, Defaults, Family, Names, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("use_expert_bias", True)
    routing = RoutingSpec(
        top_k=config.top_k,
        score="sigmoid",
        renormalize=config.flag("norm_topk_prob"),
        renormalize_eps=1e-6,
        scale=config.number("routed_scaling_factor"),
        correction_bias=True,
    )
    return spec_of(config, routing)


def _layers(config: Config) -> tuple[int, ...]:
    return tuple(range(config.integer("num_dense_layers"), config.integer("num_hidden_layers")))


_NAMES = Names.below(
    experts="feed_forward.experts.",
    single=W123,
    router="feed_forward.gate.weight",
    correction_bias="feed_forward.expert_bias",
)
_DEFAULTS: dict[str, Defaults] = {
    "lfm2_moe": {
        "hidden_size": 2048,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 32,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
}
FAMILY = Family("lfm2_moe", ("lfm2_moe",), _NAMES, _spec, _layers, defaults=_DEFAULTS)
