"""OLMoE: Qwen3-MoE's names; ``intermediate_size`` is the width of an expert, every layer is MoE."""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, every_layer

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_experts=config.integer("num_experts", "num_local_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok"), renormalise=config.flag("norm_topk_prob", default=False)
        ),
    )


FAMILY = Family(name="olmoe", model_types=("olmoe",), names=Names.below(), spec_of=_spec, layers_of=every_layer)
