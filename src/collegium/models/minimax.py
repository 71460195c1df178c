"""MiniMax-Text-01 and M1: Mixtral's experts and routing; an optional shared MLP is not published and refused."""

from __future__ import annotations

from .base import Config, Family, Names, every_layer
from .mixtral import NAMES, spec

__all__ = ["FAMILY"]


def _layers(config: Config) -> tuple[int, ...]:
    shared = config.value("shared_intermediate_size", default=0)
    if shared not in (0, [0]):
        raise config.wrong("shared_intermediate_size", shared, "0; the shared MLP of this family is not implemented")
    config.passed_over("shared_moe_mode", "layernorm_mlp_alpha", "layernorm_mlp_beta", "mlp_alpha_factor", "mlp_beta_factor")
    return every_layer(config)


FAMILY = Family(
    name="minimax",
    model_types=("minimax", "minimax_text_01", "minimax_m1", "minimax_vl_01"),
    names=NAMES,
    others=(Names.below(),),
    spec_of=spec,
    layers_of=_layers,
)
