"""Mixtral: softmax over all experts, always renormalised, every layer is MoE."""

from typing import Any

from ..types import MoESpec, RoutingSpec
from .base import PREFIXES, W123, WIDTH, Config, Family, Names, spec_of
from .in_memory import InMemory

__all__ = ["FAMILY", "IN_MEMORY", "NAMES", "mixtral_names", "mixtral_spec"]


def mixtral_spec(config: Config, _: int) -> MoESpec:
    """Return the spec of a Mixtral layer; raises ConfigError."""
    return spec_of(config, RoutingSpec(top_k=config.top_k), width=WIDTH)


def mixtral_names(layer: str = PREFIXES[0], **others: Any) -> Names:
    """Return Mixtral's table below ``layer``; others: further fields, as for ``Names.below``."""
    gate = "block_sparse_moe.gate.weight"
    return Names.below(layer, experts="block_sparse_moe.experts.", single=W123, router=gate, **others)


NAMES = mixtral_names()
_DEFAULTS = {
    "mixtral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
    },
}
IN_MEMORY = InMemory(renames=((r"\.block_sparse_moe\.", ".mlp."),))
FAMILY = Family(
    "mixtral", ("mixtral",), NAMES, mixtral_spec, others=(Names.below(),), defaults=_DEFAULTS, in_memory=IN_MEMORY
)
