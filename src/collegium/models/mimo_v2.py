"""MiMo-V2: DeepSeek-V3's routing and names, a dense first layer."""

from .base import Family, layers_after_first
from .deepseek_v3 import NAMES, deepseek_spec

__all__ = ["FAMILY"]


FAMILY = Family("mimo_v2", ("mimo_v2_flash",), NAMES, deepseek_spec, layers_after_first)
