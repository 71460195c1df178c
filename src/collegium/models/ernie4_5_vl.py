"""ERNIE-4.5-VL: separate experts and routers for text and for image tokens, of different widths; layers take text.

The files number the experts of image tokens after those of text. A caller with image tokens routes them itself.
"""

from dataclasses import replace

from ..types import MoESpec, RoutingSpec, SharedSpec
from .base import Config, Defaults, Family, Names, projections_of

__all__ = ["FAMILY"]


def _width(config: Config) -> int:
    """Return the width of an expert of text: the first of two widths."""
    widths = config.items("moe_intermediate_size") or []
    if len(widths) != 2 or isinstance(widths[0], bool) or not isinstance(widths[0], int):
        raise config.wrong("moe_intermediate_size", widths, "a list of two integers, for text and for image tokens")
    return widths[0]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("hidden_act", "silu")
    config.only("use_bias", False)
    width = _width(config)
    shared = config.integer("moe_num_shared_experts")
    floor = config.number("moe_norm_min")
    return MoESpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=width,
        num_experts=config.integer("moe_num_experts", "num_experts"),
        routing=RoutingSpec(top_k=config.top_k, renormalize_floor=floor, correction_bias=True),
        shared=SharedSpec(intermediate_size=shared * width) if shared else None,
    )


def _layers(config: Config) -> tuple[int, ...]:
    kinds = config.kinds("mlp_layer_types")
    layers = range(config.integer("num_hidden_layers"))
    return tuple(i for i in layers if (i > 0 if kinds is None else kinds[i] == "sparse"))


_SHARED = projections_of("mlp.shared_experts.")
_NAMES = replace(
    Names.below(
        correction_bias="mlp.moe_statics.e_score_correction_bias", shared=_SHARED, outside=("mlp.gate.weight_1",)
    ),
    image_experts=True,
)
_SAVED = Names.below(
    experts="mlp.text_moe.experts.",
    router="mlp.text_moe.gate.weight",
    correction_bias="mlp.text_moe.gate.moe_statics.e_score_correction_bias",
    shared=_SHARED,
    outside=("mlp.vision_moe",),
)
_DEFAULT: Defaults = {
    "hidden_size": 2560,
    "moe_intermediate_size": [1536, 512],
    "num_hidden_layers": 28,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_norm_min": 1e-12,
    "use_bias": False,
    "hidden_act": "silu",
}
_TYPES = ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text")
FAMILY = Family("ernie4_5_vl", _TYPES, _NAMES, _spec, _layers, (_SAVED,), dict.fromkeys(_TYPES, _DEFAULT))
