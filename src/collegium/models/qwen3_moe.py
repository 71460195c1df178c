"""Qwen3-MoE: softmax routing, dense layers by list and by step, no shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..types import MoESpec, RoutingSpec
from .base import Family, Names, StackedNames, flag, integer, integers, require_silu

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILY"]


def _describe(config: Mapping[str, object]) -> MoESpec:
    require_silu(config)
    return MoESpec(
        hidden_size=integer(config, "hidden_size"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        num_experts=integer(config, "num_experts", "num_local_experts"),
        routing=RoutingSpec(
            top_k=integer(config, "num_experts_per_tok"),
            score="softmax",
            renormalise=flag(config, "norm_topk_prob", default=False),
        ),
    )


def _moe_layers(config: Mapping[str, object]) -> tuple[int, ...]:
    dense, step = integers(config, "mlp_only_layers"), integer(config, "decoder_sparse_step", default=1)
    layers = range(integer(config, "num_hidden_layers"))
    return tuple(i for i in layers if i not in dense and step > 0 and (i + 1) % step == 0)


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    names=Names(
        experts="model.layers.{layer}.mlp.experts.",
        gate="model.layers.{layer}.mlp.experts.{expert}.gate_proj",
        up="model.layers.{layer}.mlp.experts.{expert}.up_proj",
        down="model.layers.{layer}.mlp.experts.{expert}.down_proj",
        stacked=StackedNames(
            gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
            down="model.layers.{layer}.mlp.experts.down_proj",
        ),
        router_weight="model.layers.{layer}.mlp.gate.weight",
    ),
    describe=_describe,
    moe_layers=_moe_layers,
)
