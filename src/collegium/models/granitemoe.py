"""Granite-MoE: stacked experts, top-k then softmax; later model types have a shared expert with fused gate and up."""

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import WIDTH, Config, Family, Names, StackedNames, every_layer, spec_of
from .in_memory import InMemory

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    shared_size = config.integer("shared_intermediate_size", default=0)
    routing = RoutingSpec(top_k=config.top_k, score="topk_softmax")
    shared = SharedSpec(intermediate_size=shared_size) if shared_size else None
    return spec_of(config, routing, width=WIDTH, shared=shared)


def _layers(config: Config) -> tuple[int, ...]:
    return every_layer(config) if config.integer("num_local_experts") else ()


_SHARED = ("shared_mlp.input_linear", "shared_mlp.output_linear")
_NAMES = Names.below(
    experts="block_sparse_moe.",
    single=(),
    stacked=StackedNames(
        gate_up="block_sparse_moe.input_linear", down="block_sparse_moe.output_linear", plain=".weight"
    ),
    router="block_sparse_moe.router.layer.weight",
    shared=_SHARED,
)
_SAVED = Names.below(experts="block_sparse_moe.experts.", router="block_sparse_moe.router.weight", shared=_SHARED)
_DEFAULT = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
}
_DEFAULTS = {
    "granitemoe": _DEFAULT,
    "granitemoeshared": {**_DEFAULT, "shared_intermediate_size": 0},
    "granitemoehybrid": {**_DEFAULT, "shared_intermediate_size": 1024},
}
_IN_MEMORY = InMemory(renames=((r"block_sparse_moe\.router\.layer\.", "block_sparse_moe.router."),))
FAMILY = Family("granitemoe", tuple(_DEFAULTS), _NAMES, _spec, _layers, (_SAVED,), _DEFAULTS, in_memory=_IN_MEMORY)
