"""Mixtral: softmax over all experts, always renormalised, every layer is MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..types import MoESpec, RoutingSpec
from .base import Family, Names, StackedNames, integer, require_silu

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILY"]


def _describe(config: Mapping[str, object]) -> MoESpec:
    require_silu(config)
    return MoESpec(
        hidden_size=integer(config, "hidden_size"),
        intermediate_size=integer(config, "intermediate_size"),
        num_experts=integer(config, "num_local_experts"),
        routing=RoutingSpec(top_k=integer(config, "num_experts_per_tok"), score="softmax", renormalise=True),
    )


def _moe_layers(config: Mapping[str, object]) -> tuple[int, ...]:
    return tuple(range(integer(config, "num_hidden_layers")))


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    names=Names(
        experts="model.layers.{layer}.block_sparse_moe.experts.",
        gate="model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
        up="model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
        down="model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
        stacked=StackedNames(
            gate_up="model.layers.{layer}.block_sparse_moe.experts.gate_up_proj",
            down="model.layers.{layer}.block_sparse_moe.experts.down_proj",
        ),
        router_weight="model.layers.{layer}.block_sparse_moe.gate.weight",
    ),
    describe=_describe,
    moe_layers=_moe_layers,
)
