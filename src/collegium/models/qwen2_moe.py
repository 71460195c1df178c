"""Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE: Qwen3-MoE with a shared expert behind a sigmoid gate.

Qwen3.5 always renormalises and has no entry for it.
"""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names
from .qwen3_moe import step_layers

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    always = str(config.value("model_type", default="")).startswith("qwen3_5")
    if always:
        config.only("norm_topk_prob", True)
    shared = config.integer("shared_expert_intermediate_size")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        num_experts=config.integer("num_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok"),
            renormalise=always or config.flag("norm_topk_prob", default=False),
        ),
        shared=SharedSpec(intermediate_size=shared, gated=True),
    )


FAMILY = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    names=Names.below(
        shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
        shared_gate="mlp.shared_expert_gate.weight",
    ),
    spec_of=_spec,
    layers_of=step_layers,
)
