"""GLM-4.5 to 5.x: DeepSeek-V3's routing and names; GLM-5.3-Flash clamps its SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from ..types import ActivationSpec, MoESpec
from .base import Config, Family, listed_layers
from .deepseek_v3 import NAMES, spec

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    limit = config.value("swiglu_limit", default=None)
    bound = None if limit is None else config.number("swiglu_limit")
    return replace(spec(config, layer), activation=ActivationSpec(limit=bound))


def _layers(config: Config) -> tuple[int, ...]:
    early = ("glm4_moe", "glm4v_moe", "glm4v_moe_text", "glm4_moe_lite")
    return listed_layers(config, first=1 if config.value("model_type", default="") in early else 3)


FAMILY = Family(
    name="glm4_moe",
    model_types=(
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm4v_moe_text",
        "glm_moe_dsa",
        "glm5_next",
        "glm5_next_text",
    ),
    names=NAMES,
    spec_of=_spec,
    layers_of=_layers,
)
