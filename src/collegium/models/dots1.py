"""dots.llm1 and Solar Open: DeepSeek-V3's routing and names; all layers of Solar Open have experts."""

from .base import Config, Defaults, Family, every_layer, listed_layers
from .deepseek_v3 import NAMES, deepseek_spec

__all__ = ["FAMILY"]


def _layers(config: Config) -> tuple[int, ...]:
    if config.kind != "solar_open":
        return listed_layers(config)
    config.passed_over("first_k_dense_replace")  # the class has no dense layers
    return every_layer(config)


# The class of dots.llm1 has null for the numbers of experts, with which no model can run.
_DEFAULTS: dict[str, Defaults] = {
    "dots1": {
        "hidden_size": 4608,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 62,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
    },
    "solar_open": {
        "hidden_size": 4096,
        "moe_intermediate_size": 1280,
        "num_hidden_layers": 48,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
    },
}
FAMILY = Family("dots1", tuple(_DEFAULTS), NAMES, deepseek_spec, _layers, defaults=_DEFAULTS)
