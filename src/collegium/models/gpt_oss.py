"""gpt-oss: stacked experts with biases and interleaved gate and up, router with a bias, clamped SwiGLU.

``hidden_act`` says ``silu`` in the published configs although the activation is SwiGLU-OAI, so it is not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import Family, Names, StackedNames, integer, number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILY"]


def _describe(config: Mapping[str, object]) -> MoESpec:
    return MoESpec(
        hidden_size=integer(config, "hidden_size"),
        intermediate_size=integer(config, "intermediate_size"),
        num_experts=integer(config, "num_local_experts"),
        routing=RoutingSpec(top_k=integer(config, "num_experts_per_tok", "experts_per_token"), score="topk_softmax"),
        activation=ActivationSpec(
            kind="swiglu_oai",
            limit=number(config, "swiglu_limit", default=7.0),
            alpha=number(config, "swiglu_alpha", default=1.702),
        ),
        expert_bias=True,
    )


def _moe_layers(config: Mapping[str, object]) -> tuple[int, ...]:
    return tuple(range(integer(config, "num_hidden_layers")))


FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    names=Names(
        experts="model.layers.{layer}.mlp.experts.",
        stacked=StackedNames(
            gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
            down="model.layers.{layer}.mlp.experts.down_proj",
            interleaved=True,
            transposed=True,
        ),
        router_weight="model.layers.{layer}.mlp.router.weight",
        router_bias="model.layers.{layer}.mlp.router.bias",
    ),
    describe=_describe,
    moe_layers=_moe_layers,
)
