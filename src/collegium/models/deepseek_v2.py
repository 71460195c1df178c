"""DeepSeek-V2: softmax scores, whole groups kept by their best expert, no renormalisation, a shared expert."""

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, listed_layers, projections_of, shared_width, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    config.only("topk_method", "greedy", "group_limited_greedy")
    groups, kept = config.integer("n_group", default=1), config.integer("topk_group", default=1)
    grouped = config.value("topk_method", default="greedy") == "group_limited_greedy"
    routing = RoutingSpec(
        top_k=config.top_k,
        renormalise=False,
        groups=groups if grouped else 1,
        kept_groups=kept if grouped else 1,
        scale=config.number("routed_scaling_factor", default=1.0),
    )
    return spec_of(config, routing, shared=shared_width(config, "n_shared_experts"))


_NAMES = Names.below(shared=projections_of("mlp.shared_experts."))
FAMILY = Family("deepseek_v2", ("deepseek_v2",), _NAMES, _spec, listed_layers)
