"""Mistral-4: softmax scores, groups chosen by their two best experts, renormalised; a shared expert."""

from ..types import MoESpec, RoutingSpec
from .base import Config, Defaults, Family, Names, listed_layers, projections_of, shared_width, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("scoring_func", "softmax")
    routing = RoutingSpec(
        top_k=config.top_k,
        renormalize=config.flag("norm_topk_prob"),
        renormalize_eps=1e-20,
        groups=config.integer("n_group"),
        topk_groups=config.integer("topk_group"),
        group_score="top2_sum",
        scale=config.number("routed_scaling_factor"),
    )
    return spec_of(config, routing, shared=shared_width(config, "n_shared_experts"))


_NAMES = Names.below(shared=projections_of("mlp.shared_experts."))
_DEFAULTS: dict[str, Defaults] = {
    "mistral4": {
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 36,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
    },
}
FAMILY = Family("mistral4", ("mistral4",), _NAMES, _spec, listed_layers, defaults=_DEFAULTS)
