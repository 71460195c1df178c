"""Gemma-4: a separate, normalised and scaled router input; a factor for every expert's weight; gated GELU.

The caller runs the layer's dense MLP, which has a separate input and norms, and the norm of the experts' input: call
the layer with ``router_input``.
"""

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import PREFIXES, Config, Family, Names, every_layer, projections_of, spec_of

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("hidden_activation", "gelu_pytorch_tanh")
    eps = config.number("rms_norm_eps")
    routing = RoutingSpec(top_k=config.top_k, input_norm_eps=eps, expert_scale=True)
    return spec_of(config, routing, activation=ActivationSpec(kind="geglu_tanh"))


def _layers(config: Config) -> tuple[int, ...]:
    return every_layer(config) if config.flag("enable_moe_block") else ()


_NAMES = Names.below(
    PREFIXES[1],
    experts="experts.",
    router="router.proj.weight",
    router_scale="router.scale",
    outside=projections_of("mlp."),
    expert_scale="router.per_expert_scale",
)
_TYPES = ("gemma4", "gemma4_text")
_DEFAULT = {
    "hidden_size": 2304,
    "num_hidden_layers": 30,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
}
FAMILY = Family("gemma4", _TYPES, _NAMES, _spec, _layers, defaults=dict.fromkeys(_TYPES, _DEFAULT))
