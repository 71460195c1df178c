"""EXAONE-MoE (K-EXAONE): DeepSeek-V3's routing; the correction bias is a tensor of the block, not of the router."""

from ..types import MoESpec
from .base import Config, Defaults, Family, Names, listed_layers, projections_of, shared_width, spec_of
from .deepseek_v3 import NAMES, biased_sigmoid

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    return spec_of(config, biased_sigmoid(config), shared=shared_width(config, "num_shared_experts"))


_NAMES = Names.below(correction_bias="mlp.e_score_correction_bias", shared=projections_of("mlp.shared_experts."))
_DEFAULTS: dict[str, Defaults] = {
    "exaone_moe": {
        "hidden_size": 4096,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 32,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
    },
}
FAMILY = Family("exaone_moe", ("exaone_moe",), _NAMES, _spec, listed_layers, (NAMES,), _DEFAULTS)
