"""MiniMax-M3: M2's routing with a scale, SwiGLU-OAI in halves without biases, a shared expert of the same kind."""

from __future__ import annotations

from ..types import ActivationSpec, MoESpec, RoutingSpec, SharedSpec
from .base import W123, Config, Family, Names, listed_layers

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.only("hidden_act", "swigluoai", "silu")  # transformers writes silu and computes SwiGLU-OAI
    config.only("scoring_func", "sigmoid")
    config.only("use_routing_bias", True)
    count, shared = config.integer("n_shared_experts", default=1), config.integer("shared_intermediate_size")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size", "moe_intermediate_size"),
        num_experts=config.integer("num_local_experts", "num_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok"),
            score="sigmoid",
            scale=config.number("routed_scaling_factor", default=2.0),
            correction_bias=True,
        ),
        activation=ActivationSpec(
            kind="swiglu_oai",
            limit=config.number("swiglu_limit", default=7.0),
            alpha=config.number("swiglu_alpha", default=1.702),
        ),
        shared=SharedSpec(intermediate_size=count * shared),
    )


FAMILY = Family(
    name="minimax_m3",
    model_types=("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
    names=Names.below(
        "language_model.model.layers.{layer}.",
        experts="block_sparse_moe.experts.",
        single=W123,
        router="block_sparse_moe.gate.weight",
        correction_bias="block_sparse_moe.e_score_correction_bias",
        shared=(
            "block_sparse_moe.shared_experts.gate_proj",
            "block_sparse_moe.shared_experts.up_proj",
            "block_sparse_moe.shared_experts.down_proj",
        ),
    ),
    others=(
        Names.below(
            "model.language_model.layers.{layer}.",
            correction_bias="mlp.gate.e_score_correction_bias",
            shared=("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"),
        ),
    ),
    spec_of=_spec,
    layers_of=listed_layers,
)
