"""gpt-oss: stacked experts with biases and interleaved gate and up, router with a bias, clamped SwiGLU.

``hidden_act`` says ``silu`` in the published configs although the activation is SwiGLU-OAI.
"""

from __future__ import annotations

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import Config, Family, Names, StackedNames, every_layer

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_experts=config.integer("num_local_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok", "experts_per_token"), score="topk_softmax"
        ),
        activation=ActivationSpec(
            kind="swiglu_oai",
            limit=config.number("swiglu_limit", default=7.0),
            alpha=config.number("swiglu_alpha", default=1.702),
        ),
        expert_bias=True,
    )


FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    names=Names.below(
        single=(),
        stacked=StackedNames(
            gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", interleaved=True, transposed=True
        ),
        router="mlp.router.weight",
        router_bias="mlp.router.bias",
    ),
    spec_of=_spec,
    layers_of=every_layer,
)
