"""OLMoE: Qwen3-MoE's names; ``intermediate_size`` is the width of an expert, every layer is MoE."""

from ..types import MoESpec
from .base import Config, Family, Names, spec_of
from .qwen3_moe import qwen_routing

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    return spec_of(config, qwen_routing(config), wide="intermediate_size")


FAMILY = Family("olmoe", ("olmoe",), Names.below(), _spec)
