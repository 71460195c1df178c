"""Qwen3-MoE, Qwen3-VL-MoE and Qwen3-Omni: softmax routing, dense layers by list and by step, no shared expert.

The published Qwen3-VL-MoE stacks are stored input-first; copies saved again may be output-first, so both are known and
the shapes of the two stacks together decide. Its model code always renormalises.
"""

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, StackedNames, each_nth, spec_of

__all__ = ["FAMILY", "qwen_routing", "step_layers"]


def step_layers(config: Config) -> tuple[int, ...]:
    """Return every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not name; raises ConfigError."""
    dense = config.items("mlp_only_layers") or []
    if any(isinstance(item, bool) or not isinstance(item, int) for item in dense):
        raise config.wrong("mlp_only_layers", dense, "a list of integers")
    return tuple(i for i in each_nth(config, config.integer("decoder_sparse_step", default=1)) if i not in dense)


def qwen_routing(config: Config) -> RoutingSpec:
    """Return softmax routing; Qwen3-VL and Qwen3.5 always renormalise."""
    always = str(config.value("model_type", default="")).startswith(("qwen3_vl", "qwen3_5"))
    if always:
        config.only("norm_topk_prob", True)
    return RoutingSpec(top_k=config.top_k, renormalise=always or config.flag("norm_topk_prob", default=False))


def _spec(config: Config, _: int) -> MoESpec:
    return spec_of(config, qwen_routing(config))


_STACK = StackedNames(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", transposed=True)
_TYPES = ("qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_omni_moe", "qwen3_omni_moe_text")
FAMILY = Family("qwen3_moe", _TYPES, Names.below(), _spec, step_layers, (Names.below(stacked=_STACK),))
