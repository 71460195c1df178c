"""OLMoE: Qwen3-MoE's names; ``intermediate_size`` is the width of an expert, every layer is MoE."""

from ..types import MoESpec
from .base import WIDTH, Config, Family, Names, spec_of
from .qwen3_moe import qwen_routing

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    return spec_of(config, qwen_routing(config), width=WIDTH)


_DEFAULTS = {
    "olmoe": {
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "hidden_act": "silu",
    },
}
FAMILY = Family("olmoe", ("olmoe",), Names.below(), _spec, defaults=_DEFAULTS)
