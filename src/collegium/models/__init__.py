"""Model families: how a ``config.json`` becomes a ``MoESpec``, and how each family names its tensors.

Adding a family is one file with its literal name table and one entry in ``FAMILIES``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import ConfigError
from . import deepseek_v3, gguf, gguf_gpt_oss, gpt_oss, mixtral, qwen3_moe
from .base import Family, Names, StackedNames
from .quantization import Declared, declared_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..types import MoESpec

__all__ = [
    "FAMILIES",
    "Declared",
    "Family",
    "Names",
    "StackedNames",
    "declared_format",
    "describe",
    "expert_path",
    "family_of",
    "moe_layers",
]

FAMILIES: tuple[Family, ...] = (
    qwen3_moe.FAMILY,
    mixtral.FAMILY,
    deepseek_v3.FAMILY,
    gpt_oss.FAMILY,
    gguf.FAMILY,
    gguf_gpt_oss.FAMILY,
)


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family whose ``model_types`` hold the config's ``model_type``; raises ConfigError naming the known."""
    asked = config.get("model_type")
    for family in FAMILIES:
        if asked in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    msg = f"config.json: model_type is {asked!r}, known are {known}; a new family is one file in collegium/models"
    raise ConfigError(msg)


def moe_layers(config: Mapping[str, object]) -> tuple[int, ...]:
    """Return the indices of the layers that have routed experts; raises ConfigError."""
    return family_of(config).moe_layers(config)


def expert_path(family: Family, layer: int) -> str:
    """Return the module path that quantisation tables are asked about: a projection of expert 0, or the stack."""
    return (family.names.gate or family.names.stacked.gate_up).format(layer=layer, expert=0)


def describe(config: Mapping[str, object]) -> MoESpec:
    """Return the ``MoESpec`` of the model's MoE layers.

    ``weight_format`` is what the quantisation block says of the first MoE layer's experts, else what ``dtype`` says,
    else ``bf16``. Raises ConfigError for an unknown model type, a missing or ill-typed entry, or an unknown
    quantisation, and SpecError when the entries contradict each other.
    """
    family = family_of(config)
    layers = family.moe_layers(config)
    if not layers:
        msg = f"config.json of model_type {config.get('model_type')!r}: no layer has routed experts"
        raise ConfigError(msg)
    declared = declared_format(config, expert_path(family, layers[0]))
    return replace(family.describe(config), weight_format=declared.format or "bf16")
