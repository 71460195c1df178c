"""Nemotron-H and Nemotron-3 in GGUF files: experts without a gate, squared ReLU, widths of all layers in a list.

A layer is attention or Mamba where its width is 0, and has experts where it is not. The latent width of later models,
``moe_latent_size``, is refused.
"""

from dataclasses import replace

from ..types import ActivationSpec, MoESpec
from .base import Config, Family, Names, StackedNames
from .gguf import gguf_spec

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    spec = gguf_spec(config, layer)
    activation = ActivationSpec(kind="relu2")
    shared = None if spec.shared is None else replace(spec.shared, activation=activation)
    return replace(spec, activation=activation, shared=shared)


def _layers(config: Config) -> tuple[int, ...]:
    widths = config.items("feed_forward_length")
    count = config.integer("block_count")
    if widths is None or len(widths) != count:
        raise config.wrong("feed_forward_length", widths, f"a list with one width for each of {count} layers")
    return tuple(layer for layer, width in enumerate(widths) if width)


_NAMES = Names.below(
    "blk.{layer}.",
    experts="ffn_exps.",
    single=("up", "down"),
    stacked=StackedNames(gate_up="ffn_exps.up", down="ffn_exps.down"),
    router="ffn_gate_inp.weight",
    correction_bias="exp_probs_b.bias",
    shared=("ffn_up_shexp", "ffn_down_shexp"),
)
FAMILY = Family("gguf_nemotron_h", ("gguf:nemotron_h_moe",), _NAMES, _spec, _layers)
