"""Model families: how a ``config.json`` becomes a ``MoESpec``, and how each family names its tensors.

Adding a family is one file with its literal name table and one entry in ``FAMILIES``.
"""

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ConfigError
from ..types import MoESpec

from . import (  # isort: skip
    arctic, dbrx, deepseek_v2, deepseek_v3, deepseek_v4, ernie4_5, gemma4, gguf, gguf_gpt_oss, glm4_moe, gpt_oss,
    granitemoe, hunyuan, hy_v3, jamba, kimi_linear, llama4, mimo_v2, minimax, minimax_m2, minimax_m3, mixtral,
    nemotron_h, olmoe, phimoe, qwen2_moe, qwen3_moe, step3, step3p7,
)  # fmt: skip
from .base import PREFIXES, Family, Names, StackedNames, is_wrapped, text_of
from .quantization import Declared, declared_format, experts_apart, mixed_algorithms
from .spellings import unpacked

__all__ = [
    "FAMILIES", "PREFIXES", "Declared", "Family", "Names", "StackedNames", "declared_format", "describe",
    "experts_apart", "family_of", "is_wrapped", "mixed_algorithms", "moe_layers", "text_of", "unpacked",
]  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    qwen3_moe.FAMILY, mixtral.FAMILY, deepseek_v3.FAMILY, gpt_oss.FAMILY, arctic.FAMILY, dbrx.FAMILY,
    deepseek_v2.FAMILY, deepseek_v4.FAMILY, ernie4_5.FAMILY, gemma4.FAMILY, glm4_moe.FAMILY, granitemoe.FAMILY,
    hunyuan.FAMILY, hy_v3.FAMILY, jamba.FAMILY, kimi_linear.FAMILY, llama4.FAMILY, mimo_v2.FAMILY, minimax.FAMILY,
    minimax_m2.FAMILY, minimax_m3.FAMILY, nemotron_h.FAMILY, olmoe.FAMILY, phimoe.FAMILY, qwen2_moe.FAMILY,
    step3.FAMILY, step3p7.FAMILY, gguf.FAMILY, gguf_gpt_oss.FAMILY,
)  # fmt: skip


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family of the config's ``model_type``, or of its text part; raises ConfigError naming the known."""
    asked = config.get("model_type")
    for name in (asked, text_of(config).get("model_type")):
        for family in FAMILIES:
            if name in family.model_types:
                return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    msg = f"config.json: model_type is {asked!r}, known are {known}; a new family is one file in collegium/models"
    raise ConfigError(msg)


def moe_layers(config: Mapping[str, object]) -> tuple[int, ...]:
    """Return the indices of the layers that have routed experts; raises ConfigError."""
    return family_of(config).moe_layers(config)


def describe(config: Mapping[str, object], layer: int | None = None) -> MoESpec:
    """Return the ``MoESpec`` of an MoE layer, default the last one; few families differ from layer to layer.

    ``weight_format`` is what the quantisation block says of the layer's experts, by default of the first MoE layer's,
    else what ``dtype`` says, else ``bf16``. Raises ConfigError for an unknown model type, a missing, ill-typed or
    unimplemented entry, or an unknown quantisation, and SpecError when the entries contradict each other.
    """
    family = family_of(config)
    layers = family.moe_layers(config)
    if not layers:
        raise ConfigError(f"config.json of model_type {config.get('model_type')!r}: no layer has routed experts")
    # what quantisation tables are asked about: a projection of expert 0, or the stack
    named = family.names.gate or family.names.up or family.names.stacked.gate_up
    path = named.format(layer=layers[0] if layer is None else layer, expert=0)
    layer_prefix = family.names.layer.partition("{layer}")[0]
    heads = (prefix.partition("{layer}")[0] for prefix in (family.names.layer, *PREFIXES))
    said = [declared_format(config, path.replace(layer_prefix, head)).format for head in dict.fromkeys(heads)]
    # tables that name modules in full know one prefix: the answer without rivals is theirs
    return replace(family.describe(config, layer), weight_format=min(said, key=said.count) or "bf16")
