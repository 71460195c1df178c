"""Kimi-Linear and Kimi-K3: DeepSeek-V3's routing, Mixtral's projections; K3 adds a latent width and SiTU."""

from ..types import ActivationSpec, MoESpec
from .base import Config, Family, layers_after_first, projections_of, shared_width, spec_of
from .deepseek_v3 import NAMES, biased_sigmoid
from .mixtral import mixtral_names

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("hidden_act", "silu", "situ")
    config.only("moe_router_activation_func", "sigmoid")
    activation = ActivationSpec()
    if config.value("hidden_act", default="silu") == "situ":
        gate, up = config.number("activation_situ_beta"), config.number("activation_situ_linear_beta")
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
FAMILY = Family("kimi_linear", ("kimi_linear", "kimi_k3"), _NAMES, _spec, layers_after_first, (NAMES,))
