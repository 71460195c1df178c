"""gpt-oss in GGUF files: router and experts with biases, clamped SwiGLU; gate and up are separate."""

from dataclasses import replace

from ..types import ActivationSpec, MoESpec
from .base import Config, Family
from .gguf import NAMES, gguf_layers, gguf_spec

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    # The published models share limit and alpha, which the metadata lack.
    activation = ActivationSpec(kind="swiglu_oai", limit=7.0, alpha=1.702)
    return replace(gguf_spec(config, layer), activation=activation, expert_bias=True)


_NAMES = replace(
    NAMES,
    router_bias="blk.{layer}.ffn_gate_inp.bias",
    biases=tuple("blk.{layer}.ffn_exps.bias." + which for which in ("gate", "up", "down")),
)
FAMILY = Family("gguf_gpt_oss", ("gguf:gpt-oss",), _NAMES, _spec, gguf_layers)
