"""MiniMax-M3: M2's routing with a scale, SwiGLU-OAI with gate before up and without biases, a shared expert."""

from ..types import MoESpec, SharedSpec
from .base import WIDTH, Config, Family, Names, listed_layers, projections_of, spec_of
from .gpt_oss import swiglu_oai
from .in_memory import InMemory
from .minimax_m2 import minimax_routing
from .mixtral import mixtral_names

__all__ = ["FAMILY"]


def _spec(config: Config, _: int) -> MoESpec:
    config.only("hidden_act", "swigluoai", "silu")  # transformers writes silu and computes SwiGLU-OAI
    count = config.integer("n_shared_experts", default=1)
    shared_size = config.integer("shared_intermediate_size")
    routing = minimax_routing(config, config.number("routed_scaling_factor"))
    config.only("moe_intermediate_size", config.integer("intermediate_size"))
    shared = SharedSpec(intermediate_size=count * shared_size)
    return spec_of(config, routing, width=WIDTH, activation=swiglu_oai(config), shared=shared)


_NAMES = mixtral_names(
    "language_model.model.layers.{layer}.",
    correction_bias="block_sparse_moe.e_score_correction_bias",
    shared=projections_of("block_sparse_moe.shared_experts."),
)
_SAVED = Names.below(
    correction_bias="mlp.gate.e_score_correction_bias",
    shared=("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"),
)
_TYPES = ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text")
_DEFAULT = {
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "shared_intermediate_size": 3072,
    "num_hidden_layers": 60,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 2.0,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}
_RENAMES = (
    (r"^vision_tower\.vision_model\.encoder\.layers\.", "model.vision_tower.layers."),
    (r"^multi_modal_projector\.", "model.multi_modal_projector."),
    (r"^patch_merge_mlp\.linear_", "model.multi_modal_projector.merge_linear_"),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.self_attn\.index_(q|k)_proj\.", r".self_attn.indexer.\1_proj."),
)
_IN_MEMORY = InMemory(renames=_RENAMES, joined=((("gate_proj", "up_proj"), "gate_up_proj"),))
FAMILY = Family(
    "minimax_m3",
    _TYPES,
    _NAMES,
    _spec,
    listed_layers,
    (_SAVED,),
    defaults=dict.fromkeys(_TYPES, _DEFAULT),
    in_memory=_IN_MEMORY,
)
