"""Mixtral: softmax over all experts, always renormalised, every layer is MoE."""

from ..types import MoESpec, RoutingSpec
from .base import W123, Config, Family, Names, spec_of

__all__ = ["FAMILY", "NAMES", "mixtral_spec"]


def mixtral_spec(config: Config, _: int) -> MoESpec:
    """Return the spec of a Mixtral layer; raises ConfigError."""
    return spec_of(config, RoutingSpec(top_k=config.top_k), wide="intermediate_size")


NAMES = Names.below(experts="block_sparse_moe.experts.", single=W123, router="block_sparse_moe.gate.weight")
FAMILY = Family("mixtral", ("mixtral",), NAMES, mixtral_spec, others=(Names.below(),))
