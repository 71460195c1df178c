"""Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE in GGUF files: a shared expert with a sigmoid gate.

The gate's row is stored without its first dimension.
"""

from dataclasses import replace

from ..types import MoESpec, SharedSpec
from .base import Config, Family
from .gguf import NAMES, gguf_layers, gguf_spec

__all__ = ["FAMILY"]


def _spec(config: Config, layer: int) -> MoESpec:
    spec = gguf_spec(config, layer)
    assert spec.shared is not None, "the architecture has a shared expert in each layer"
    return replace(spec, shared=SharedSpec(intermediate_size=spec.shared.intermediate_size, gated=True))


_NAMES = replace(NAMES, shared_gate="blk.{layer}.ffn_gate_inp_shexp.weight")
_TYPES = ("gguf:qwen2moe", "gguf:qwen3next", "gguf:qwen35moe")
FAMILY = Family("gguf_qwen2moe", _TYPES, _NAMES, _spec, gguf_layers)
