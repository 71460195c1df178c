"""Step-3.5 and 3.7: sigmoid scores with a correction bias and a scale, SwiGLU clamped after SiLU in some layers.

Routed and shared experts have separate limits, one entry per layer, 0 for none.
"""

from typing import Any

from ..types import ActivationSpec, MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names, projections_of, spec_of
from .deepseek_v3 import NAMES
from .in_memory import InMemory
from .step3 import STACK, enumerated_layers

__all__ = ["FAMILY"]


def _limited(config: Config, key: str, layer: int) -> ActivationSpec:
    limits = config.items(key) or []
    limit = limits[layer] if layer < len(limits) else None
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 0):
        raise config.wrong(key, limit, "a list of numbers, 0 for none")
    return ActivationSpec(kind="swiglu_step", limit=float(limit)) if limit else ActivationSpec()


def _spec(config: Config, layer: int) -> MoESpec:
    for key in ("hidden_act", "scoring_func", "moe_router_activation"):
        config.only(key, "silu" if key == "hidden_act" else "sigmoid")
    for key in ("use_moe", "use_moe_router_bias", "norm_expert_weight"):
        config.only(key, True)
    config.only("n_shared_experts", 1)
    scale = config.number("moe_router_scaling_factor")
    routing = RoutingSpec(top_k=config.top_k, score="sigmoid", scale=scale, correction_bias=True)
    limited = _limited(config, "swiglu_limits_shared", layer)
    shared = SharedSpec(intermediate_size=config.integer("share_expert_dim", "share_expert_dims"), activation=limited)
    return spec_of(config, routing, activation=_limited(config, "swiglu_limits", layer), shared=shared)


def _layers(config: Config) -> tuple[int, ...]:
    return enumerated_layers(config, range(3, config.integer("num_hidden_layers")))


_NON_EXPERT_NAMES: dict[str, Any] = {
    "router": "moe.gate.weight",
    "correction_bias": "moe.router_bias",
    "shared": projections_of("share_expert."),
}
_PUBLISHED = Names.below(experts="moe.", single=(), stacked=STACK, **_NON_EXPERT_NAMES)
_SINGLE = Names.below(experts="moe.experts.", **_NON_EXPERT_NAMES)
_TYPES = ("step3p7", "step3p5", "step3p7_text")
_DEFAULT = {
    "hidden_size": 4096,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "num_hidden_layers": 45,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_router_scaling_factor": 1.0,
    "hidden_act": "silu",
}
_RENAMES = (
    (r"^vision_model\.transformer\.resblocks\.", "vision_model.layers."),
    (r"^(vision_model\.layers\.\d+)\.attn\.", r"\1.self_attn."),
    (r"^(vision_model\.layers\.\d+\.mlp)\.c_fc\.", r"\1.fc1."),
    (r"^(vision_model\.layers\.\d+\.mlp)\.c_proj\.", r"\1.fc2."),
    (r"^vision_model\.", "model.vision_model."),
    (r"^vit_large_projector\.", "model.multi_modal_projector."),
    (r"\.moe\.gate\.", ".mlp.gate."),
    (r"\.share_expert\.", ".mlp.shared_experts."),
)
_IN_MEMORY = InMemory(renames=_RENAMES)
FAMILY = Family(
    "step3p7",
    _TYPES,
    _PUBLISHED,
    _spec,
    _layers,
    (_SINGLE, NAMES),
    defaults=dict.fromkeys(_TYPES, _DEFAULT),
    in_memory=_IN_MEMORY,
)
