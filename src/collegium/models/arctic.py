"""Snowflake Arctic: Mixtral's experts in every n-th layer, renormalised when more than one is chosen.

The dense residual MLP of a layer has an input of its own and stays with the caller.
"""

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, each_nth, spec_of
from .mixtral import NAMES

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.passed_over("moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity")
    config.passed_over("moe_token_dropping", "enable_expert_tensor_parallelism", "parallel_attn_mlp_res")
    return spec_of(config, RoutingSpec(top_k=config.top_k, renormalise=config.top_k > 1), wide="intermediate_size")


def _layers(config: Config) -> tuple[int, ...]:
    return each_nth(config, config.integer("moe_layer_frequency", default=2))


FAMILY = Family("arctic", ("arctic",), NAMES, _spec, _layers)
