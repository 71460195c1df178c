"""DeepSeek-V3, V3.2 and Kimi-K2: sigmoid scores with a correction bias, grouped top-k, a shared expert.

Layers from ``num_hidden_layers`` on are for multi-token prediction and not supported.
"""

from ..types import MoESpec, RoutingSpec
from .base import Config, Defaults, Family, Names, listed_layers, projections_of, shared_width, spec_of
from .in_memory import InMemory

__all__ = ["FAMILY", "NAMES", "biased_sigmoid", "deepseek_spec"]


def biased_sigmoid(config: Config) -> RoutingSpec:
    """Return the routing of DeepSeek-V3 and of later models with the same one; raises ConfigError."""
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    return RoutingSpec(
        top_k=config.top_k,
        score="sigmoid",
        renormalize=config.flag("norm_topk_prob", "moe_renormalize"),
        renormalize_eps=1e-20,
        groups=config.integer("n_group", "num_expert_group"),
        topk_groups=config.integer("topk_group"),
        group_score="top2_sum",
        scale=config.number("routed_scaling_factor"),
        correction_bias=True,
    )


def deepseek_spec(config: Config, _: int) -> MoESpec:
    """Return the spec of a DeepSeek-V3 layer; raises ConfigError."""
    return spec_of(config, biased_sigmoid(config), shared=shared_width(config, "n_shared_experts"))


NAMES = Names.below(correction_bias="mlp.gate.e_score_correction_bias", shared=projections_of("mlp.shared_experts."))
_DEFAULT = {
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
}
# Kimi-K2 is published with DeepSeek-V3's configuration class.
_TYPES = ("deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25")
_DEFAULTS: dict[str, Defaults] = dict.fromkeys(_TYPES, _DEFAULT)
# For the vision tower of Kimi-K2.5.
_RENAMES = (
    (r"^(vision_tower\.encoder\.blocks\.\d+)\.wo\.", r"\1.attn.proj."),
    (r"^(vision_tower\.encoder\.blocks\.\d+\.mlp)\.fc1\.", r"\1.fc2."),
    (r"^(vision_tower\.encoder\.blocks\.\d+\.mlp)\.fc0\.", r"\1.fc1."),
    (r"^vision_tower\.encoder\.blocks\.", "model.vision_tower.layers."),
    (r"^vision_tower\.encoder\.", "model.vision_tower."),
    (r"^mm_projector\.proj\.0\.", "model.mm_projector.in_proj."),
    (r"^mm_projector\.proj\.2\.", "model.mm_projector.out_proj."),
)
_IN_MEMORY = InMemory(renames=_RENAMES)
FAMILY = Family("deepseek_v3", _TYPES, NAMES, deepseek_spec, listed_layers, defaults=_DEFAULTS, in_memory=_IN_MEMORY)
