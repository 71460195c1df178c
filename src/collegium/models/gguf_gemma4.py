"""Gemma-4 in GGUF files: a normalised and scaled router input, a factor of each expert's output, gated GELU.

The caller runs the layer's dense MLP and norms, and passes the router's input: see ``gemma4``.
"""

from dataclasses import replace

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import Config, Family
from .gguf import NAMES, gguf_layers

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    routing = RoutingSpec(
        top_k=config.integer("expert_used_count"),
        input_norm_eps=config.number("attention.layer_norm_rms_epsilon"),
        expert_scale=True,
    )
    return MoESpec(
        hidden_size=config.integer("embedding_length"),
        intermediate_size=config.integer("expert_feed_forward_length"),
        num_experts=config.integer("expert_count"),
        routing=routing,
        activation=ActivationSpec(kind="geglu_tanh"),
    )


_NAMES = replace(
    NAMES,
    correction_bias=None,
    shared=None,
    router_scale="blk.{layer}.ffn_gate_inp.scale",
    expert_scale="blk.{layer}.ffn_exps.scale.down",
    outside=tuple(f"blk.{{layer}}.ffn_{which}" for which in ("gate", "up", "down")),
)
FAMILY = Family("gguf_gemma4", ("gguf:gemma4",), _NAMES, _spec, gguf_layers)
