"""Granite-MoE: stacked experts, top-k then softmax; the later kinds have a shared expert, gate and up in one."""

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Config, Family, Names, StackedNames, every_layer, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    wide = config.integer("shared_intermediate_size", default=0)
    routing = RoutingSpec(top_k=config.top_k, score="topk_softmax")
    shared = SharedSpec(intermediate_size=wide) if wide else None
    return spec_of(config, routing, wide="intermediate_size", shared=shared)


def _layers(config: Config) -> tuple[int, ...]:
    return every_layer(config) if config.integer("num_local_experts", default=0) else ()


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
_TYPES = ("granitemoe", "granitemoeshared", "granitemoehybrid")
FAMILY = Family("granitemoe", _TYPES, _NAMES, _spec, _layers, (_SAVED,))
