"""Gemma-4: the router reads a normalised, scaled input of its own; every expert's weight has a factor; gated GELU.

The layer's dense MLP has an input and norms of its own and stays with the caller, like the norm of the experts'
input: call the layer with ``router_input``.
"""

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import PREFIXES, Config, Family, Names, every_layer, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("hidden_activation", "gelu_pytorch_tanh")
    eps = config.number("rms_norm_eps", default=1e-6)
    routing = RoutingSpec(top_k=config.top_k, input_norm_eps=eps, expert_scale=True)
    return spec_of(config, routing, activation=ActivationSpec(kind="geglu_tanh"))


def _layers(config: Config) -> tuple[int, ...]:
    return every_layer(config) if config.flag("enable_moe_block", default=False) else ()


_NAMES = Names.below(
    PREFIXES[1],
    experts="experts.",
    router="router.proj.weight",
    router_scale="router.scale",
    expert_scale="router.per_expert_scale",
)
FAMILY = Family("gemma4", ("gemma4", "gemma4_text"), _NAMES, _spec, _layers)
