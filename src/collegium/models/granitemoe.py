"""Granite-MoE: stacked experts, top-k then softmax; the later kinds have a shared expert, gate and up in one."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names, StackedNames, every_layer

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    shared = config.integer("shared_intermediate_size", default=0)
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_experts=config.integer("num_local_experts"),
        routing=RoutingSpec(top_k=config.integer("num_experts_per_tok"), score="topk_softmax"),
        shared=SharedSpec(intermediate_size=shared) if shared else None,
    )


def _layers(config: Config) -> tuple[int, ...]:
    return every_layer(config) if config.integer("num_local_experts", default=0) else ()


FAMILY = Family(
    name="granitemoe",
    model_types=("granitemoe", "granitemoeshared", "granitemoehybrid"),
    names=Names.below(
        experts="block_sparse_moe.",
        single=(),
        stacked=StackedNames(
            gate_up="block_sparse_moe.input_linear", down="block_sparse_moe.output_linear", plain=".weight"
        ),
        router="block_sparse_moe.router.layer.weight",
        shared=("shared_mlp.input_linear", "shared_mlp.output_linear"),
    ),
    others=(
        Names.below(
            experts="block_sparse_moe.experts.",
            router="block_sparse_moe.router.weight",
            shared=("shared_mlp.input_linear", "shared_mlp.output_linear"),
        ),
    ),
    spec_of=_spec,
    layers_of=_layers,
)
