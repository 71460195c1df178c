"""Hy3: sigmoid scores with a correction bias and a scale; the first layer is dense; a shared expert."""

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, layers_after_first, projections_of, shared_width, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.passed_over("enable_moe_fp32_combine")  # the sum is float32 here in any case
    routing = RoutingSpec(
        top_k=config.top_k,
        score="sigmoid",
        renormalise_eps=1e-20,
        scale=config.number("router_scaling_factor", default=2.826),
        correction_bias=True,
    )
    return spec_of(config, routing, shared=shared_width(config, "num_shared_experts", default=1))


_NAMES = Names.below(
    router="mlp.router.gate.weight", correction_bias="mlp.expert_bias", shared=projections_of("mlp.shared_mlp.")
)
_SAVED = Names.below(correction_bias="mlp.e_score_correction_bias", shared=projections_of("mlp.shared_experts."))
FAMILY = Family("hy_v3", ("hy_v3",), _NAMES, _spec, layers_after_first, (_SAVED,))
