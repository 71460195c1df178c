"""DeepSeek-V3, V3.2 and Kimi-K2: sigmoid scores with a correction bias, grouped top-k, a shared expert.

Layers from ``num_hidden_layers`` on hold multi-token prediction and are not described here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Family, Names, StackedNames, flag, integer, number, require_silu, value

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILY"]


def _only(config: Mapping[str, object], key: str, allowed: str) -> None:
    found = value(config, (key,), allowed)
    if found != allowed:
        msg = f"config.json of model_type {config.get('model_type')!r}: {key} is {found!r}, allowed is {allowed!r}"
        raise ConfigError(msg)


def _describe(config: Mapping[str, object]) -> MoESpec:
    require_silu(config)
    _only(config, "scoring_func", "sigmoid")
    _only(config, "topk_method", "noaux_tc")
    wide = integer(config, "moe_intermediate_size")
    shared = integer(config, "n_shared_experts", default=0)
    return MoESpec(
        hidden_size=integer(config, "hidden_size"),
        intermediate_size=wide,
        num_experts=integer(config, "n_routed_experts", "num_local_experts"),
        routing=RoutingSpec(
            top_k=integer(config, "num_experts_per_tok"),
            score="sigmoid",
            renormalise=flag(config, "norm_topk_prob", default=True),
            renormalise_eps=1e-20,
            groups=integer(config, "n_group", default=1),
            kept_groups=integer(config, "topk_group", default=1),
            group_score="top2_sum",
            scale=number(config, "routed_scaling_factor", default=1.0),
            correction_bias=True,
        ),
        shared=SharedSpec(intermediate_size=shared * wide) if shared else None,
    )


def _moe_layers(config: Mapping[str, object]) -> tuple[int, ...]:
    first = integer(config, "first_k_dense_replace", default=0)
    step = integer(config, "moe_layer_freq", default=1)
    if step < 1:
        msg = f"config.json: moe_layer_freq is {step}, allowed is 1 or more"
        raise ConfigError(msg)
    return tuple(i for i in range(first, integer(config, "num_hidden_layers")) if i % step == 0)


FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "deepseek_v32", "kimi_k2"),
    names=Names(
        experts="model.layers.{layer}.mlp.experts.",
        gate="model.layers.{layer}.mlp.experts.{expert}.gate_proj",
        up="model.layers.{layer}.mlp.experts.{expert}.up_proj",
        down="model.layers.{layer}.mlp.experts.{expert}.down_proj",
        stacked=StackedNames(
            gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
            down="model.layers.{layer}.mlp.experts.down_proj",
        ),
        router_weight="model.layers.{layer}.mlp.gate.weight",
        correction_bias="model.layers.{layer}.mlp.gate.e_score_correction_bias",
        shared=(
            "model.layers.{layer}.mlp.shared_experts.gate_proj",
            "model.layers.{layer}.mlp.shared_experts.up_proj",
            "model.layers.{layer}.mlp.shared_experts.down_proj",
        ),
    ),
    describe=_describe,
    moe_layers=_moe_layers,
)
