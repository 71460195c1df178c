"""MiniMax-Text-01 and M1: Mixtral's experts and routing; the optional shared MLP, in no published model, is refused."""

from .base import Config, Family, Names, every_layer
from .mixtral import IN_MEMORY, NAMES, mixtral_spec

__all__ = ["FAMILY"]


def _layers(config: Config) -> tuple[int, ...]:
    shared = config.value("shared_intermediate_size", default=0)
    if shared not in (0, [0]):
        raise config.wrong("shared_intermediate_size", shared, "0; the shared MLP of this family is not implemented")
    config.passed_over("shared_moe_mode", "mlp_alpha_factor", "mlp_beta_factor")
    config.passed_over("layernorm_mlp_alpha", "layernorm_mlp_beta")
    return every_layer(config)


_TYPES = ("minimax", "minimax_text_01", "minimax_m1", "minimax_vl_01")
# The configs of the other model types, which ship their model code, state every entry.
_DEFAULTS = {
    "minimax": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
    },
}
FAMILY = Family("minimax", _TYPES, NAMES, mixtral_spec, _layers, (Names.below(),), _DEFAULTS, in_memory=IN_MEMORY)
