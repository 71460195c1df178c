"""Step-3.5 and 3.7: sigmoid scores with a correction bias and a scale, SwiGLU clamped after SiLU in some layers.

Routed and shared experts have limits of their own, one entry a layer, 0 for none.
"""

from __future__ import annotations

from ..types import ActivationSpec, MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names
from .deepseek_v3 import NAMES
from .step3 import SHARED, STACK, enumerated_layers

__all__ = ["FAMILY"]


def _limited(config: Config, key: str, layer: int) -> ActivationSpec:
    limits = config.items(key) or []
    limit = limits[layer] if layer < len(limits) else None
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 0):
        raise config.wrong(key, limit, "a list of numbers, 0 for none")
    return ActivationSpec(kind="swiglu_step", limit=float(limit)) if limit else ActivationSpec()


def _spec(config: Config, layer: int) -> MoESpec:
    config.silu()
    config.only("scoring_func", "sigmoid")
    config.only("moe_router_activation", "sigmoid")
    config.only("use_moe_router_bias", True)
    config.only("norm_expert_weight", True)
    config.only("n_shared_experts", 1)
    config.passed_over("use_moe")
    shared = config.integer("share_expert_dim", "share_expert_dims")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        num_experts=config.integer("n_routed_experts", "moe_num_experts", "num_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok", "moe_top_k"),
            score="sigmoid",
            scale=config.number("moe_router_scaling_factor", default=1.0),
            correction_bias=True,
        ),
        activation=_limited(config, "swiglu_limits", layer),
        shared=SharedSpec(intermediate_size=shared, activation=_limited(config, "swiglu_limits_shared", layer)),
    )


def _layers(config: Config) -> tuple[int, ...]:
    return enumerated_layers(config, tuple(range(3, config.integer("num_hidden_layers"))))


_ROUTER = {"router": "moe.gate.weight", "correction_bias": "moe.router_bias", "shared": SHARED}

FAMILY = Family(
    name="step3p7",
    model_types=("step3p7", "step3p5", "step3p7_text"),
    names=Names.below(experts="moe.", single=(), stacked=STACK, **_ROUTER),
    others=(Names.below(experts="moe.experts.", **_ROUTER), NAMES),
    spec_of=_spec,
    layers_of=_layers,
)
