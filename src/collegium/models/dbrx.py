"""DBRX: experts follow each other along the rows of ``w1`` (gate), ``v1`` (up) and ``w2`` (down, input-first)."""

from ..types import MoESpec, RoutingSpec
from .base import Config, Family, Names, StackedNames

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    inner = config.inner("ffn_config")
    act = inner.value("ffn_act_fn")
    if act != {"name": "silu"}:
        raise inner.wrong("ffn_act_fn", act, "{'name': 'silu'}")
    inner.passed_over("moe_jitter_eps", "moe_loss_weight")
    inner.only("moe_normalize_expert_weights", 1.0)  # the L1 norm of positive weights is their sum
    return MoESpec(
        hidden_size=config.integer("d_model", "hidden_size"),
        intermediate_size=inner.integer("ffn_hidden_size"),
        num_experts=inner.integer("moe_num_experts"),
        routing=RoutingSpec(top_k=inner.top_k),
    )


def _layers(config: Config) -> tuple[int, ...]:
    return tuple(range(config.integer("n_layers", "num_hidden_layers")))


_NAMES = Names.below(
    "transformer.blocks.{layer}.",
    experts="ffn.experts.",
    single=(),
    stacked=StackedNames(gate_up="ffn.experts.mlp.w1", up="ffn.experts.mlp.v1", down="ffn.experts.mlp.w2", flat=True),
    router="ffn.router.layer.weight",
)
_DEFAULTS = {
    "dbrx": {
        "d_model": 2048,
        "n_layers": 24,
        "ffn_config": {
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": 3584,
            "moe_num_experts": 4,
            "moe_top_k": 1,
            "moe_normalize_expert_weights": 1.0,
        },
    },
}
_NULL = frozenset(("ffn_config",))
FAMILY = Family("dbrx", ("dbrx",), _NAMES, _spec, _layers, defaults=_DEFAULTS, null_is_default=_NULL)
