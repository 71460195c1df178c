"""Llama-4 in GGUF files: the router's weight, a sigmoid of the logit, multiplies the expert's input."""

from dataclasses import replace

from ..types import MoESpec
from .base import Config, Family
from .gguf import NAMES, gguf_layers, gguf_spec

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    spec = gguf_spec(config, layer)
    return replace(spec, routing=replace(spec.routing, weight_on_input=True))


FAMILY = Family("gguf_llama4", ("gguf:llama4",), replace(NAMES, correction_bias=None), _spec, gguf_layers)
