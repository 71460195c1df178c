"""Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE: Qwen3-MoE with a shared expert behind a sigmoid gate.

Qwen3.5 always renormalises and has no entry for it.
"""

from ..types import MoESpec, SharedSpec
from .base import Config, Family, Names, projections_of, spec_of
from .qwen3_moe import qwen_routing, step_layers

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    shared = SharedSpec(intermediate_size=config.integer("shared_expert_intermediate_size"), gated=True)
    return spec_of(config, qwen_routing(config), shared=shared)


_NAMES = Names.below(shared=projections_of("mlp.shared_expert."), shared_gate="mlp.shared_expert_gate.weight")
_TYPES = ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
FAMILY = Family("qwen2_moe", _TYPES, _NAMES, _spec, step_layers)
