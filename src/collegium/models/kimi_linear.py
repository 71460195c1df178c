"""Kimi-Linear and Kimi-K3: DeepSeek-V3's routing, Mixtral's projections; K3 adds a latent width and SiTU."""

from ..types import ActivationSpec, MoESpec
from .base import Config, Family, listed_layers, projections_of, shared_width, spec_of
from .deepseek_v3 import NAMES, biased_sigmoid
from .in_memory import FORGET_GATE, InMemory
from .mixtral import mixtral_names

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    act = config.value("hidden_act")
    if act not in ("silu", "situ"):
        raise config.wrong("hidden_act", act, "'silu' and 'situ'")
    config.only("moe_router_activation_func", "sigmoid")
    activation = ActivationSpec()
    if act == "situ":
        gate = config.number("activation_situ_beta")
        up = config.number("activation_situ_linear_beta")
        activation = ActivationSpec(kind="situ", gate_bound=gate, up_bound=up)
    latent = config.integer("routed_expert_hidden_size", default=0) or None
    norm = latent is not None and config.flag("latent_moe_use_norm", default=False)
    return spec_of(
        config,
        biased_sigmoid(config),
        activation=activation,
        latent_size=latent,
        latent_norm_eps=config.number("rms_norm_eps", default=1e-5) if norm else None,
        shared=shared_width(config, "num_shared_experts", "n_shared_experts"),
    )


_NAMES = mixtral_names(
    correction_bias="block_sparse_moe.gate.e_score_correction_bias",
    shared=projections_of("block_sparse_moe.shared_experts."),
    latent=("block_sparse_moe.routed_expert_down_proj", "block_sparse_moe.routed_expert_up_proj"),
    latent_norm="block_sparse_moe.routed_expert_norm.weight",
)
# The configs of Kimi-K3 state every entry.
_DEFAULTS = {
    "kimi_linear": {
        "hidden_size": 2304,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "hidden_act": "silu",
    },
}
_TYPES = ("kimi_linear", "kimi_k3")
_RENAMES = (*FORGET_GATE, (r"\.block_sparse_moe\.", ".mlp."))
_IN_MEMORY = InMemory(renames=_RENAMES)
FAMILY = Family("kimi_linear", _TYPES, _NAMES, _spec, listed_layers, (NAMES,), _DEFAULTS, in_memory=_IN_MEMORY)
