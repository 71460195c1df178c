"""Tensors of a layer that nothing would use: an error that names them, in every family; those of the rest pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium import load_layer
from collegium.checkpoint import Checkpoint, CheckpointLayer, audit
from collegium.checkpoint.index import index_of
from collegium.commands.inspect import inspect_model
from collegium.errors import CheckpointError, UnknownTensorError
from collegium.models import FAMILIES, Family, family_of, moe_layers
from family_cases import CASES, build

if TYPE_CHECKING:
    from torch import Tensor

ONE_EACH = sorted(
    {family_of({"model_type": n}).name: n for n in CASES if any(n in f.model_types for f in FAMILIES)}.values()
)
# Below a layer, in the words of some family; the layer's own family has them or not.
FOREIGN = (
    "mlp.gate.bias", "mlp.gate.e_score_correction_bias", "mlp.gate.per_expert_scale", "mlp.expert_bias",
    "mlp.shared_expert_gate.weight", "mlp.shared_experts.gate.weight", "mlp.experts.per_expert_scale",
    "mlp.experts.0.gate.weight", "mlp.experts.0.scale", "moe.router_bias", "share_expert.up_proj.weight",
    "shared_mlp.input_linear.weight", "block_sparse_moe.gate.bias", "block_sparse_moe.expert_bias",
    "router.per_expert_scale", "router.bias", "experts.scale", "expert_bias", "e_score_correction_bias",
    "feed_forward.router.bias", "feed_forward.expert_bias", "ffn.gate.bias", "latent_proj.weight",
    "moe_statics.e_score_correction_bias", "routed_expert_norm.weight", "residual_mlp.w1.weight", "router_norm.weight",
)  # fmt: skip
REST = (
    "self_attn.rotary_emb.inv_freq", "self_attn.q_proj.bias", "self_attn.g_proj.weight", "self_attn.k_scale",
    "input_layernorm.weight", "mlp_res_proj.weight", "ffn_hc.base", "mlp_hc.scale",
    "post_attention_layernorm.weight", "pre_feedforward_layernorm_2.weight",
    "post_moe_norm.weight", "ffn_norm.weight", "hc_ffn_base", "layer_scalar", "linear_attn.A_log", "mamba.D",
    "attention_gate.weight", "per_layer_input_gate.weight", "eh_proj.weight", "shared_head.head.weight",
)  # fmt: skip


def known(family: Family, config: dict[str, object], layer: int, name: str) -> bool:
    """Tell whether a table of the family has a tensor of this name below a layer, or a network that stays outside."""
    for names in (family.names, *family.others):
        cut = len(names.layer)
        exact = (names.router_weight, names.router_bias, names.correction_bias, names.router_scale, names.expert_scale)
        paths = (*(names.shared or ()), *(names.latent or ()), *(names.outside or ()))
        if name in {path[cut:] for path in exact if path} or name.startswith(tuple(path[cut:] + "." for path in paths)):
            return True
    return False


def changed(folder: Path, tensors: dict[str, Tensor], name: str, numbers: Tensor) -> None:
    save_file({**tensors, name: numbers}, folder / "model.safetensors")


@pytest.mark.parametrize("original", [True, False], ids=["published", "saved"])
@pytest.mark.parametrize("kind", ONE_EACH)
def test_unused_tensor_is_named(tmp_path: Path, kind: str, original: bool) -> None:
    build(CASES[kind], tmp_path, original=original)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    checkpoint, layer = Checkpoint.open(tmp_path), moe_layers(config)[-1]
    head, family = index_of(checkpoint).names.layer.format(layer=layer), family_of(config)
    refused = 0
    for name in FOREIGN:
        if head + name in tensors or known(family, config, layer, name):
            continue
        changed(tmp_path, tensors, head + name, torch.randn(5))
        for call in (
            lambda: load_layer(tmp_path, layer, device="cpu"),
            lambda: audit(Checkpoint.open(tmp_path), deep=False),
        ):
            with pytest.raises(UnknownTensorError) as caught:
                call()
            assert head + name in str(caught.value)
        refused += 1
    assert refused >= len(FOREIGN) - 5
    with pytest.raises(UnknownTensorError):
        inspect_model(str(tmp_path), device="cpu", deep=False)


@pytest.mark.parametrize("kind", ONE_EACH)
def test_tensors_of_the_rest_are_accepted(tmp_path: Path, kind: str) -> None:
    build(CASES[kind], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    checkpoint, layer = Checkpoint.open(tmp_path), moe_layers(config)[-1]
    head = index_of(checkpoint).names.layer
    more = {head.format(layer=layer) + name: torch.randn(5) for name in REST}
    # a layer behind the last one predicts further tokens, with experts and a bias in its own words
    more |= {head.format(layer=99) + name: torch.randn(5) for name in ("mlp.gate.bias", "mtp.experts.scale")}
    more |= {"mtp.layers.0.mlp.expert_bias": torch.randn(5), "model.mtp.0.router.bias": torch.randn(5)}
    save_file({**more, **tensors}, tmp_path / "model.safetensors")
    audit(Checkpoint.open(tmp_path), deep=False)
    assert load_layer(tmp_path, layer, device="cpu").spec == CheckpointLayer.open(checkpoint, layer).spec


USED = {
    "qwen2_moe": ("mlp.shared_expert.", {"shared_expert_intermediate_size": 0}),
    "deepseek_v3": ("mlp.shared_experts.", {"n_shared_experts": 0}),
    "granitemoehybrid": ("shared_mlp.", {"shared_intermediate_size": 0}),
    "nemotron_h_latent": ("mixer.fc1_latent_proj.", {"moe_latent_size": None}),
}


@pytest.mark.parametrize("kind", list(USED))
def test_config_omitting_stored_module_refused(tmp_path: Path, kind: str) -> None:
    path, entries = USED[kind]
    build(CASES[kind], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **entries}))
    layer = moe_layers(config)[-1]
    with pytest.raises((CheckpointError, ValueError), match=path if kind == "deepseek_v3" else None):
        load_layer(tmp_path, layer, device="cpu")
