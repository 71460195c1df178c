"""Hy3: sigmoid scores with a correction bias and a scale; the first layer is dense; a shared expert."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, listed_layers, shared_width

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    config.passed_over("enable_moe_fp32_combine")  # the sum is float32 here in any case
    wide = config.integer("moe_intermediate_size")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=wide,
        num_experts=config.integer("num_experts", "num_local_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok"),
            score="sigmoid",
            renormalise_eps=1e-20,
            scale=config.number("router_scaling_factor", default=2.826),
            correction_bias=True,
        ),
        shared=shared_width(config, wide, "num_shared_experts", default=1),
    )


def _layers(config: Config) -> tuple[int, ...]:
    return listed_layers(config, first=1)


FAMILY = Family(
    name="hy_v3",
    model_types=("hy_v3",),
    names=Names.below(
        router="mlp.router.gate.weight",
        correction_bias="mlp.expert_bias",
        shared=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"),
    ),
    others=(
        Names.below(
            correction_bias="mlp.e_score_correction_bias",
            shared=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
        ),
    ),
    spec_of=_spec,
    layers_of=_layers,
)
