"""Model families: how a ``config.json`` becomes a ``MoESpec``, and how each family names its tensors.

Adding a family is one file with its literal name table and one entry in ``FAMILIES``.
"""

from collections.abc import Mapping
from dataclasses import replace

from ..types import MoESpec

from . import (  # isort: skip
    arctic,
    base,
    dbrx,
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    dots1,
    ernie4_5,
    ernie4_5_vl,
    exaone_moe,
    gemma4,
    gguf,
    gguf_gemma4,
    gguf_gpt_oss,
    gguf_llama4,
    gguf_nemotron_h,
    gguf_qwen2moe,
    glm4_moe,
    gpt_oss,
    granitemoe,
    hunyuan,
    hy_v3,
    jamba,
    kimi_linear,
    lfm2_moe,
    llama4,
    mimo_v2,
    minimax,
    minimax_m2,
    minimax_m3,
    mistral4,
    mixtral,
    nemotron_h,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
    step3,
    step3p7,
)
from .base import NESTED, PREFIXES, Family, Names, StackedNames, is_wrapped, text_of
from .derived import DerivedFamily, derived_family
from .name_variants import either_way, unpacked
from .quantization import (
    Declared,
    declared_format,
    experts_apart,
    method_of,
    mixed_algorithms,
    quantization_block,
    without_quantization,
)
from .unknown import dense_error, mentions_experts, no_experts_in, unknown_error

__all__ = [
    "FAMILIES",
    "NESTED",
    "PREFIXES",
    "Declared",
    "DerivedFamily",
    "Family",
    "Names",
    "StackedNames",
    "declared_format",
    "dense_error",
    "derived_family",
    "describe",
    "either_way",
    "experts_apart",
    "family_of",
    "is_wrapped",
    "mentions_experts",
    "method_of",
    "mixed_algorithms",
    "moe_layers",
    "no_experts_in",
    "quantization_block",
    "text_of",
    "unknown_error",
    "unpacked",
    "without_quantization",
]

FAMILIES: tuple[Family, ...] = (
    qwen3_moe.FAMILY,
    mixtral.FAMILY,
    deepseek_v3.FAMILY,
    gpt_oss.FAMILY,
    arctic.FAMILY,
    dbrx.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v4.FAMILY,
    dots1.FAMILY,
    ernie4_5.FAMILY,
    ernie4_5_vl.FAMILY,
    exaone_moe.FAMILY,
    gemma4.FAMILY,
    glm4_moe.FAMILY,
    granitemoe.FAMILY,
    hunyuan.FAMILY,
    hy_v3.FAMILY,
    jamba.FAMILY,
    kimi_linear.FAMILY,
    lfm2_moe.FAMILY,
    llama4.FAMILY,
    mimo_v2.FAMILY,
    minimax.FAMILY,
    minimax_m2.FAMILY,
    minimax_m3.FAMILY,
    mistral4.FAMILY,
    nemotron_h.FAMILY,
    olmoe.FAMILY,
    phimoe.FAMILY,
    qwen2_moe.FAMILY,
    step3.FAMILY,
    step3p7.FAMILY,
    gguf.FAMILY,
    gguf_gemma4.FAMILY,
    gguf_gpt_oss.FAMILY,
    gguf_llama4.FAMILY,
    gguf_nemotron_h.FAMILY,
    gguf_qwen2moe.FAMILY,
)


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family of the config's ``model_type``, or of its text part.

    A type without a file whose config is about experts is derived from its class in transformers, if that is
    installed. Raises ConfigError for an unknown type, with the closest known ones, for a dense model, and for a class
    that cannot be derived.
    """
    outer = config.get("model_type")
    inner = text_of(config).get("model_type")
    names = (inner if inner is not None else outer,) if outer in base.AUTO_TEXT else (outer, inner)
    for name in names:
        for family in FAMILIES:
            if name in family.model_types:
                if (dense := no_experts_in(config)) is not None:
                    raise dense
                return family
    if mentions_experts(config) and (derived := derived_family(config)) is not None:
        return derived
    raise unknown_error(config, (name for family in FAMILIES for name in family.model_types))


def moe_layers(config: Mapping[str, object]) -> tuple[int, ...]:
    """Return the indices of the layers that have routed experts; raises ConfigError."""
    return family_of(config).moe_layers(config)


def describe(config: Mapping[str, object], layer: int | None = None) -> MoESpec:
    """Return the ``MoESpec`` of an MoE layer, default the last one; layers differ in few families.

    ``weight_format`` and ``down_format`` are the formats that the quantisation block declares for the layer's experts
    (default: those of the first MoE layer), else that of ``dtype``, else ``bf16``. Raises ConfigError for an unknown
    model type, a missing, ill-typed or unimplemented entry, or an unknown quantisation, and SpecError if the entries
    contradict each other.
    """
    family = family_of(config)
    layers = family.moe_layers(config)
    if not layers:
        raise dense_error(config, "no layer has routed experts")
    number = layers[0] if layer is None else layer
    names = family.names
    # Look up the projections of expert 0, or the stacks, in the quantisation block.
    gate_up = _declared_module_format(config, family, names.gate or names.up or names.stacked.gate_up, number)
    down = _declared_module_format(config, family, names.down or names.stacked.down, number)
    spec = family.describe(config, layer)
    return replace(spec, weight_format=gate_up, down_format=None if down == gate_up else down)


def _declared_module_format(config: Mapping[str, object], family: Family, template: str, layer: int) -> str:
    """Return the format that the config declares for a module, for any prefix of the model's layers."""
    path = template.format(layer=layer, expert=0)
    published = family.names.layer.partition("{layer}")[0]
    heads = dict.fromkeys(prefix.partition("{layer}")[0] for prefix in (family.names.layer, *PREFIXES))
    declared = [declared_format(config, path.replace(published, head)).format for head in heads]
    # A quantisation block with full module names matches one prefix only, so the rarest result is the declared one.
    return min(declared, key=declared.count) or "bf16"
