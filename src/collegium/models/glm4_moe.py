"""GLM-4.5 to 5.x: DeepSeek-V3's routing and names; GLM-5.3-Flash clamps its SwiGLU."""

from dataclasses import replace

from ..types import ActivationSpec, MoESpec
from .base import Config, Defaults, Family, listed_layers
from .deepseek_v3 import NAMES, deepseek_spec
from .in_memory import FORGET_GATE, InMemory

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    limit = config.number("swiglu_limit", default=0)
    return replace(deepseek_spec(config, layer), activation=ActivationSpec(limit=limit or None))


_GLM4: Defaults = {
    "hidden_size": 4096,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
}
_GLM4_LITE: Defaults = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "hidden_act": "silu",
}
_GLM5: Defaults = {
    "hidden_size": 6144,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
}
_GLM5_NEXT: Defaults = {
    **_GLM5,
    "hidden_size": 4096,
    "num_hidden_layers": 45,
    "n_routed_experts": 288,
    "swiglu_limit": 10.0,
}
_DEFAULTS: dict[str, Defaults] = {
    "glm4_moe": _GLM4,
    "glm4_moe_lite": _GLM4_LITE,
    "glm4v_moe": _GLM4,
    "glm4v_moe_text": _GLM4,
    "glm_moe_dsa": _GLM5,
    "glm5_next": _GLM5_NEXT,
    "glm5_next_text": _GLM5_NEXT,
}


_RENAMES = (
    *FORGET_GATE,
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
)
_IN_MEMORY = InMemory(renames=_RENAMES)  # for GLM-5-Next
FAMILY = Family("glm4_moe", tuple(_DEFAULTS), NAMES, _spec, listed_layers, defaults=_DEFAULTS, in_memory=_IN_MEMORY)
