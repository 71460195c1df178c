"""Qwen3-MoE, Qwen3-VL-MoE and Qwen3-Omni: softmax routing, dense layers by list and by step, no shared expert.

The published Qwen3-VL-MoE stacks are stored input-first; copies saved again may be output-first, so both are known and
the shapes of the two stacks together decide. Its model code always renormalises.
"""

from __future__ import annotations

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, StackedNames

__all__ = ["FAMILY", "step_layers"]


def step_layers(config: Config) -> tuple[int, ...]:
    """Return every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not name; raises ConfigError."""
    dense, step = config.items("mlp_only_layers") or [], config.integer("decoder_sparse_step", default=1)
    if any(isinstance(item, bool) or not isinstance(item, int) for item in dense):
        raise config.wrong("mlp_only_layers", dense, "a list of integers")
    layers = range(config.integer("num_hidden_layers"))
    return tuple(i for i in layers if i not in dense and step > 0 and (i + 1) % step == 0)


def _spec(config: Config, layer: int) -> MoESpec:
    del layer
    config.silu()
    vision = str(config.value("model_type", default="")).startswith("qwen3_vl_moe")
    if vision:
        config.only("norm_topk_prob", True)
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        num_experts=config.integer("num_experts", "num_local_experts"),
        routing=RoutingSpec(
            top_k=config.integer("num_experts_per_tok"),
            renormalise=vision or config.flag("norm_topk_prob", default=False),
        ),
    )


_STACK = {"gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}

FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_omni_moe", "qwen3_omni_moe_text"),
    names=Names.below(),
    others=(Names.below(stacked=StackedNames(transposed=True, **_STACK)),),
    spec_of=_spec,
    layers_of=step_layers,
)
