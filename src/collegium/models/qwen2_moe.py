"""Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE: Qwen3-MoE with a shared expert and its sigmoid gate.

Qwen3.5 always renormalises and has no entry for it.
"""

from ..types import MoESpec, SharedSpec
from .base import Config, Defaults, Family, Names, projections_of, spec_of
from .qwen3_moe import qwen_routing, step_layers

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    shared = SharedSpec(intermediate_size=config.integer("shared_expert_intermediate_size"), gated=True)
    return spec_of(config, qwen_routing(config), shared=shared)


_NAMES = Names.below(shared=projections_of("mlp.shared_expert."), shared_gate="mlp.shared_expert_gate.weight")
_QWEN2: Defaults = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "hidden_act": "silu",
}
_QWEN3_NEXT: Defaults = {
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}
_QWEN3_5: Defaults = {
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}
_DEFAULTS: dict[str, Defaults] = {
    "qwen2_moe": _QWEN2,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}
FAMILY = Family("qwen2_moe", tuple(_DEFAULTS), _NAMES, _spec, step_layers, defaults=_DEFAULTS)
