"""Mixtral: softmax over all experts, always renormalised, every layer is MoE."""

from typing import Any

from ..types import MoESpec, RoutingSpec
from .base import PREFIXES, W123, Config, Family, Names, spec_of

__all__ = ["FAMILY", "NAMES", "mixtral_names", "mixtral_spec"]


def mixtral_spec(config: Config, _: int) -> MoESpec:
    """Return the spec of a Mixtral layer; raises ConfigError."""
    return spec_of(config, RoutingSpec(top_k=config.top_k), wide="intermediate_size")


def mixtral_names(layer: str = PREFIXES[0], **others: Any) -> Names:
    """Return Mixtral's table below ``layer``; others: further paths as ``Names.below`` takes them."""
    gate = "block_sparse_moe.gate.weight"
    return Names.below(layer, experts="block_sparse_moe.experts.", single=W123, router=gate, **others)


NAMES = mixtral_names()
FAMILY = Family("mixtral", ("mixtral",), NAMES, mixtral_spec, others=(Names.below(),))
