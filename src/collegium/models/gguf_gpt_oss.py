"""gpt-oss in GGUF files: router and experts with biases, clamped SwiGLU; gate and up stand apart."""

from __future__ import annotations

from dataclasses import replace

from ..types import ActivationSpec, MoESpec
from .base import Config, Family
from .gguf import NAMES, describe_gguf, gguf_layers

__all__ = ["FAMILY"]


def _describe(config: Config, layer: int) -> MoESpec:
    # the published models share limit and alpha; the metadata do not hold them
    activation = ActivationSpec(kind="swiglu_oai", limit=7.0, alpha=1.702)
    return replace(describe_gguf(config, layer), activation=activation, expert_bias=True)


_BIASES = ("blk.{layer}.ffn_gate_exps.bias", "blk.{layer}.ffn_up_exps.bias", "blk.{layer}.ffn_down_exps.bias")
_NAMES = replace(NAMES, router_bias="blk.{layer}.ffn_gate_inp.bias", biases=_BIASES)
FAMILY = Family("gguf_gpt_oss", ("gguf:gpt-oss",), _NAMES, _describe, gguf_layers)
