"""gpt-oss: stacked experts with biases and interleaved gate and up, router with a bias, clamped SwiGLU.

``hidden_act`` is ``silu`` in the published configs although the activation is SwiGLU-OAI.
"""

from ..types import ActivationSpec, MoESpec, RoutingSpec
from .base import WIDTH, Config, Family, Names, StackedNames, spec_of
from .in_memory import InMemory

__all__ = ["FAMILY", "swiglu_oai"]


def swiglu_oai(config: Config) -> ActivationSpec:
    """Return the activation of gpt-oss with the config's limit and factor."""
    limit = config.number("swiglu_limit")
    alpha = config.number("swiglu_alpha", default=1.702)
    return ActivationSpec(kind="swiglu_oai", limit=limit, alpha=alpha)


def _spec(config: Config, _: int) -> MoESpec:
    config.only("hidden_act", "silu")
    routing = RoutingSpec(top_k=config.top_k, score="topk_softmax")
    return spec_of(config, routing, width=WIDTH, activation=swiglu_oai(config), expert_bias=True)


_STACK = StackedNames(
    gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", interleaved=True, transposed=True
)
_NAMES = Names.below(single=(), stacked=_STACK, router="mlp.router.weight", router_bias="mlp.router.bias")
_DEFAULTS = {
    "gpt_oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
}
_IN_MEMORY = InMemory(transposed=True, marked=True)
FAMILY = Family("gpt_oss", ("gpt_oss",), _NAMES, _spec, defaults=_DEFAULTS, in_memory=_IN_MEMORY)
