"""DeepSeek-V2, VL2 and OCR: softmax scores, groups chosen by their best expert, no renormalisation, a shared expert.

The largest VL2 has DeepSeek-V3's routing: sigmoid scores with a correction bias.
"""

from ..types import MoESpec, RoutingSpec
from .base import Config, Defaults, Family, listed_layers, shared_width, spec_of
from .deepseek_v3 import NAMES, deepseek_spec

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    if config.kind == "deepseek_vl_v2" and config.value("topk_method") == "noaux_tc":
        return deepseek_spec(config, layer)
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    config.only("topk_method", "greedy", "group_limited_greedy")
    grouped = config.value("topk_method") == "group_limited_greedy"
    config.passed_over("n_group", "topk_group")
    routing = RoutingSpec(
        top_k=config.top_k,
        renormalize=False,
        groups=config.integer("n_group") if grouped else 1,
        topk_groups=config.integer("topk_group") if grouped else 1,
        scale=config.number("routed_scaling_factor"),
    )
    return spec_of(config, routing, shared=shared_width(config, "n_shared_experts"))


# The class has null for the numbers of experts per token and of groups, with which no model can run.
_DEFAULTS: dict[str, Defaults] = {
    "deepseek_v2": {
        "hidden_size": 4096,
        "moe_intermediate_size": 1407,
        "num_hidden_layers": 32,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
    },
    # Of the class published with DeepSeek-VL2; its configs state all sizes.
    "deepseek_vl_v2": {
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
    },
}
FAMILY = Family("deepseek_v2", tuple(_DEFAULTS), NAMES, _spec, listed_layers, defaults=_DEFAULTS)
