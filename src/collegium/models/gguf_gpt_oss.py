"""gpt-oss in GGUF files: router and experts with biases, clamped SwiGLU; gate and up stand apart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..types import ActivationSpec
from .base import Family
from .gguf import NAMES, describe_gguf, gguf_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..types import MoESpec

__all__ = ["FAMILY"]


def _describe(config: Mapping[str, object]) -> MoESpec:
    # the published models share limit and alpha; the metadata do not hold them
    activation = ActivationSpec(kind="swiglu_oai", limit=7.0, alpha=1.702)
    return replace(describe_gguf(config), activation=activation, expert_bias=True)


FAMILY = Family(
    name="gguf_gpt_oss",
    model_types=("gguf:gpt-oss",),
    names=replace(
        NAMES,
        router_bias="blk.{layer}.ffn_gate_inp.bias",
        biases=("blk.{layer}.ffn_gate_exps.bias", "blk.{layer}.ffn_up_exps.bias", "blk.{layer}.ffn_down_exps.bias"),
    ),
    describe=_describe,
    moe_layers=gguf_layers,
)
