"""GLM-4.5 to 5.x: DeepSeek-V3's routing and names; GLM-5.3-Flash clamps its SwiGLU."""

from dataclasses import replace

from ..types import ActivationSpec, MoESpec
from .base import Config, Family, listed_layers
from .deepseek_v3 import NAMES, deepseek_spec

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    limit = config.number("swiglu_limit", default=0)
    return replace(deepseek_spec(config, layer), activation=ActivationSpec(limit=limit or None))


def _layers(config: Config) -> tuple[int, ...]:
    return listed_layers(config, first=1 if config.value("model_type", default="") in _EARLY else 3)


_EARLY = ("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text")
_TYPES = (*_EARLY, "glm_moe_dsa", "glm5_next", "glm5_next_text")
FAMILY = Family("glm4_moe", _TYPES, NAMES, _spec, _layers)
