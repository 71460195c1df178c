"""Qwen3-MoE, Qwen3-VL-MoE and Qwen3-Omni: softmax routing, dense layers by list and by step, no shared expert.

The published Qwen3-VL-MoE stacks are input-first; copies saved again may be output-first, so both are accepted and the
shapes of the two stacks decide. Its model code always renormalises.
"""

from ..types import MoESpec, RoutingSpec
from .base import Config, Defaults, Family, Names, StackedNames, each_nth, spec_of
from .in_memory import InMemory

__all__ = ["FAMILY", "qwen_routing", "step_layers"]


def step_layers(config: Config) -> tuple[int, ...]:
    """Return every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not name; raises ConfigError."""
    dense = config.items("mlp_only_layers") or []
    if any(isinstance(item, bool) or not isinstance(item, int) for item in dense):
        raise config.wrong("mlp_only_layers", dense, "a list of integers")
    return tuple(i for i in each_nth(config, config.integer("decoder_sparse_step")) if i not in dense)


def qwen_routing(config: Config) -> RoutingSpec:
    """Return softmax routing; Qwen3-VL and Qwen3.5 always renormalise."""
    if config.kind.startswith(("qwen3_vl", "qwen3_5")):
        config.only("norm_topk_prob", True)
    return RoutingSpec(top_k=config.top_k, renormalize=config.flag("norm_topk_prob"))


def _spec(config: Config, _: int) -> MoESpec:
    return spec_of(config, qwen_routing(config))


_STACK = StackedNames(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", transposed=True)
_QWEN3: Defaults = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 24,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "hidden_act": "silu",
}
_QWEN3_VL: Defaults = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 24,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}
_QWEN3_OMNI: Defaults = {**_QWEN3, "num_hidden_layers": 28, "norm_topk_prob": True}
_DEFAULTS: dict[str, Defaults] = {
    "qwen3_moe": _QWEN3,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_vl_moe_text": _QWEN3_VL,
    "qwen3_omni_moe": _QWEN3_OMNI,
    "qwen3_omni_moe_text": _QWEN3_OMNI,
}
_OTHERS = (Names.below(stacked=_STACK),)
_IN_MEMORY = InMemory(turned_since_4=("qwen3_vl_moe", "qwen3_vl_moe_text"))
FAMILY = Family(
    "qwen3_moe", tuple(_DEFAULTS), Names.below(), _spec, step_layers, _OTHERS, _DEFAULTS, in_memory=_IN_MEMORY
)
