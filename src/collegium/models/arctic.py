"""Snowflake Arctic: Mixtral's experts in every n-th layer, renormalised when more than one is chosen.

The dense residual MLP of a layer has a separate input and is run by the caller.
"""

from ..types import MoESpec, RoutingSpec
from .base import W123, WIDTH, Config, Family, each_nth, spec_of
from .mixtral import mixtral_names

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.passed_over("moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity")
    config.passed_over("moe_token_dropping", "enable_expert_tensor_parallelism", "parallel_attn_mlp_res")
    return spec_of(config, RoutingSpec(top_k=config.top_k, renormalize=config.top_k > 1), width=WIDTH)


def _layers(config: Config) -> tuple[int, ...]:
    return each_nth(config, config.integer("moe_layer_frequency"))


_NAMES = mixtral_names(outside=tuple("residual_mlp." + name for name in W123))
_DEFAULTS = {
    "arctic": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "moe_layer_frequency": 2,
        "hidden_act": "silu",
    },
}
FAMILY = Family("arctic", ("arctic",), _NAMES, _spec, _layers, defaults=_DEFAULTS)
