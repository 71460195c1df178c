"""Hy3: sigmoid scores with a correction bias and a scale; the first layer is dense; a shared expert."""

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, listed_layers, projections_of, shared_width, spec_of
from .in_memory import InMemory

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.passed_over("enable_moe_fp32_combine")  # the sum is always float32
    routing = RoutingSpec(
        top_k=config.top_k,
        score="sigmoid",
        renormalize_eps=1e-20,
        scale=config.number("router_scaling_factor"),
        correction_bias=True,
    )
    return spec_of(config, routing, shared=shared_width(config, "num_shared_experts"))


_NAMES = Names.below(
    router="mlp.router.gate.weight", correction_bias="mlp.expert_bias", shared=projections_of("mlp.shared_mlp.")
)
_SAVED = Names.below(correction_bias="mlp.e_score_correction_bias", shared=projections_of("mlp.shared_experts."))
_DEFAULTS = {
    "hy_v3": {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 80,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "router_scaling_factor": 2.826,
        "hidden_act": "silu",
    },
}
_RENAMES = ((r"\.mlp\.router\.gate\.", ".mlp.gate."), (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."))
_IN_MEMORY = InMemory(renames=_RENAMES)
FAMILY = Family("hy_v3", ("hy_v3",), _NAMES, _spec, listed_layers, (_SAVED,), _DEFAULTS, in_memory=_IN_MEMORY)
