"""Kimi-Linear and Kimi-K3: DeepSeek-V3's routing, Mixtral's projections; K3 adds a latent width and SiTU."""

from __future__ import annotations

from ..types import ActivationSpec, MoESpec
from .base import W123, Config, Family, Names, listed_layers, shared_width
from .deepseek_v3 import NAMES, biased_sigmoid

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.only("hidden_act", "silu", "situ")
    config.only("moe_router_activation_func", "sigmoid")
    activation = ActivationSpec()
    if config.value("hidden_act", default="silu") == "situ":
        activation = ActivationSpec(
            kind="situ",
            gate_bound=config.number("activation_situ_beta"),
            up_bound=config.number("activation_situ_linear_beta"),
        )
    wide = config.integer("moe_intermediate_size")
    latent = config.integer("routed_expert_hidden_size", default=0) or None
    norm = latent is not None and config.flag("latent_moe_use_norm", default=False)
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=wide,
        num_experts=config.integer("num_experts", "num_local_experts"),
        routing=biased_sigmoid(config),
        activation=activation,
        latent_size=latent,
        latent_norm_eps=config.number("rms_norm_eps", default=1e-5) if norm else None,
        shared=shared_width(config, wide, "num_shared_experts", "n_shared_experts"),
    )


def _layers(config: Config) -> tuple[int, ...]:
    return listed_layers(config, first=1)


FAMILY = Family(
    name="kimi_linear",
    model_types=("kimi_linear", "kimi_k3"),
    names=Names.below(
        experts="block_sparse_moe.experts.",
        single=W123,
        router="block_sparse_moe.gate.weight",
        correction_bias="block_sparse_moe.gate.e_score_correction_bias",
        shared=(
            "block_sparse_moe.shared_experts.gate_proj",
            "block_sparse_moe.shared_experts.up_proj",
            "block_sparse_moe.shared_experts.down_proj",
        ),
        latent=("block_sparse_moe.routed_expert_down_proj", "block_sparse_moe.routed_expert_up_proj"),
        latent_norm="block_sparse_moe.routed_expert_norm.weight",
    ),
    others=(NAMES,),
    spec_of=_spec,
    layers_of=_layers,
)
