"""MiMo-V2: DeepSeek-V3's routing and names, a dense first layer."""

from __future__ import annotations

from .base import Config, Family, listed_layers
from .deepseek_v3 import NAMES, spec

__all__ = ["FAMILY"]


def _layers(config: Config) -> tuple[int, ...]:
    return listed_layers(config, first=1)


FAMILY = Family(name="mimo_v2", model_types=("mimo_v2_flash",), names=NAMES, spec_of=spec, layers_of=_layers)
