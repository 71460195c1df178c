"""Phi-3.5-MoE: Mixtral's experts with sparse-mixer routing, which chooses two experts one after the other."""

from ..types import MoESpec, RoutingSpec
from .base import WIDTH, Config, Family, Names, spec_of
from .in_memory import InMemory
from .mixtral import NAMES

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    jitter = config.number("router_jitter_noise")
    routing = RoutingSpec(top_k=config.top_k, score="sparsemixer", renormalize=False, jitter=jitter)
    return spec_of(config, routing, width=WIDTH)


_SAVED = Names.below(router="mlp.router.weight")
_DEFAULTS = {
    "phimoe": {
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "hidden_act": "silu",
    },
}
_RENAMES = ((r"\.block_sparse_moe\.gate\.weight", ".mlp.router.weight"), (r"\.block_sparse_moe\.", ".mlp."))
_IN_MEMORY = InMemory(renames=_RENAMES)
FAMILY = Family("phimoe", ("phimoe",), NAMES, _spec, others=(_SAVED,), defaults=_DEFAULTS, in_memory=_IN_MEMORY)
