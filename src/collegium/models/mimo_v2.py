"""MiMo-V2: DeepSeek-V3's routing and names, a dense first layer."""

from .base import Family, listed_layers
from .deepseek_v3 import NAMES, deepseek_spec

__all__ = ["FAMILY"]


# The class has no entry for shared experts, and the model has none.
_DEFAULTS = {
    "mimo_v2_flash": {
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 48,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 0,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
    },
}
FAMILY = Family(
    "mimo_v2",
    ("mimo_v2_flash",),
    NAMES,
    deepseek_spec,
    listed_layers,
    defaults=_DEFAULTS,
    null_is_default=frozenset(("n_shared_experts", "routed_scaling_factor")),
)
