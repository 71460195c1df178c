"""Families: config to spec, which layers are MoE, declared formats, and agreement with transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from collegium.checkpoint import (
    Checkpoint,
    CheckpointLayer,
    describe_checkpoint,
    load_experts,
    load_router,
    load_shared,
)
from collegium.errors import ConfigError, SpecError
from collegium.models import FAMILIES, declared_format, describe, family_of, moe_layers
from collegium.parallel.placement import linear
from collegium.types import ActivationSpec, MoESpec, RoutingSpec, SharedSpec
from raising import raises_with
from toys import TinySize, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "norm_topk_prob": True,
    "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1,
    "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3",
    },
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "hidden_act": "silu", "swiglu_limit": 7.0,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip
EXPERT = "model.layers.5.mlp.experts.0.gate_proj"


def test_published_models_are_described() -> None:
    assert describe(QWEN3) == MoESpec(
        hidden_size=2048, intermediate_size=768, num_experts=128, routing=RoutingSpec(top_k=8)
    )
    assert describe(MIXTRAL) == MoESpec(
        hidden_size=4096, intermediate_size=14336, num_experts=8, routing=RoutingSpec(top_k=2)
    )
    routing = RoutingSpec(
        top_k=8, score="sigmoid", renormalize_eps=1e-20, groups=8, topk_groups=4, group_score="top2_sum",
        scale=2.5, correction_bias=True,
    )  # fmt: skip
    assert describe(DEEPSEEK) == MoESpec(
        hidden_size=7168, intermediate_size=2048, num_experts=256, routing=routing, weight_format="fp8_block",
        shared=SharedSpec(intermediate_size=2048),
    )  # fmt: skip
    assert describe(GPT_OSS) == MoESpec(
        hidden_size=2880, intermediate_size=2880, num_experts=32, weight_format="mxfp4", expert_bias=True,
        routing=RoutingSpec(top_k=4, score="topk_softmax"),
        activation=ActivationSpec(kind="swiglu_oai", limit=7.0, alpha=1.702),
    )  # fmt: skip


def test_moe_layers() -> None:
    assert moe_layers(DEEPSEEK) == tuple(range(3, 61))
    assert moe_layers({**DEEPSEEK, "moe_layer_freq": 2, "num_hidden_layers": 9}) == (4, 6, 8)
    assert moe_layers({**QWEN3, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}) == (1, 5)
    assert moe_layers(MIXTRAL) == tuple(range(32))
    with raises_with(ConfigError, "qwen3_moe", "dense"):
        describe({**QWEN3, "mlp_only_layers": list(range(48))})


def test_families_resolve_by_model_type() -> None:
    for family in FAMILIES:
        for name in family.model_types:
            assert family_of({"model_type": name}) is family


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"model_type": "llama", "hidden_size": 64}, ConfigError, "'llama': this model is dense"),
        ({"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2"}}, ConfigError, "'qwen2_vl'.* dense"),
        ({**QWEN3, "model_type": "qwen3_mo"}, ConfigError, r"'qwen3_mo'.*qwen3_moe(, \w+){0,2}\. All"),
        ({**QWEN3, "model_type": "Mixtral"}, ConfigError, r"'Mixtral'.*: mixtral\b"),
        ({**QWEN3, "num_experts": 0}, ConfigError, "dense.*num_experts is 0"),
        ({**MIXTRAL, "num_local_experts": None}, ConfigError, "dense.*num_local_experts is None"),
        (
            {"model_type": "jamba", "num_experts": 1, "num_hidden_layers": 4},
            ConfigError,
            "'jamba': this model is dense",
        ),
        ({"model_type": "gguf:llama", "block_count": 2}, ConfigError, "dense.*expert_count"),
        ({"model_type": "gguf:gemma2", "block_count": 2}, ConfigError, "'gguf:gemma2': this model is dense"),
        ({}, ConfigError, "model_type is None"),
        ({**MIXTRAL, "hidden_size": "4096"}, ConfigError, "hidden_size is '4096', allowed is an integer"),
        ({**MIXTRAL, "hidden_size": None}, ConfigError, "hidden_size is None"),
        ({**MIXTRAL, "hidden_act": "gelu"}, ConfigError, "hidden_act is 'gelu'"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, SpecError, "top_k"),
        ({**QWEN3, "norm_topk_prob": 1}, ConfigError, "norm_topk_prob is 1"),
        ({**QWEN3, "mlp_only_layers": ["a"]}, ConfigError, "list of integers"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, ConfigError, "scoring_func is 'softmax'"),
        ({**DEEPSEEK, "routed_scaling_factor": "2"}, ConfigError, "allowed is a number"),
        ({**DEEPSEEK, "routed_scaling_factor": float("inf")}, ConfigError, "is inf, allowed is a finite number"),
        ({**DEEPSEEK, "routed_scaling_factor": float("nan")}, ConfigError, "is nan, allowed is a finite number"),
        ({**DEEPSEEK, "routed_scaling_factor": 10**400}, ConfigError, "allowed is a finite number"),
        ({**DEEPSEEK, "hidden_size": float("inf")}, ConfigError, "is inf, allowed is an integer"),
        ({**DEEPSEEK, "moe_layer_freq": 0}, ConfigError, "moe_layer_freq is 0"),
        ({**MIXTRAL, "torch_dtype": "int8"}, ConfigError, "dtype is 'int8'"),
        (
            {**MIXTRAL, "quantization_config": {"quant_method": "hqq"}},
            ConfigError,
            "'hqq', known are fp8, mxfp4",
        ),
        ({**MIXTRAL, "quantization_config": [1]}, ConfigError, "allowed is an object"),
    ],
)
def test_bad_configs(config: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        describe(config)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        (GPTQ, ("int4_group", "gptq", 32)),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, ("int4_group", "gptq_v2", 32)),
        ({**GPTQ, "checkpoint_format": None, "format": "gptq_v2"}, ("int4_group", "gptq_v2", 32)),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "format": "gptq"}, ("int4_group", "gptq_v2", 32)),
        ({**GPTQ, "sym": False}, ("int4_affine", "gptq", 32)),
        ({**GPTQ, "desc_act": True}, ("int4_ordered", "gptq", 32)),
        ({**GPTQ, "desc_act": True, "group_size": -1}, ("int4_group", "gptq", None)),
        ({**GPTQ, "bits": 4.0, "sym": 1}, ("int4_group", "gptq", 32)),
        ({**GPTQ, "bits": 8}, ("int8_affine", "gptq", 32)),
        ({**GPTQ, "dynamic": {"-:.*experts.*": {}}}, ("bf16", None, None)),
        ({**GPTQ, "dynamic": {"+:.*w9": {"bits": 8}, r".*\.experts\..*": {"bits": 8, "group_size": 64}}},
         ("int8_affine", "gptq", 64)),
        (AWQ, ("int4_affine", "awq", 32)),
        ({**AWQ, "modules_to_not_convert": ["gate"]}, ("int4_affine", "awq", 32)),
        ({**AWQ, "modules_to_not_convert": ["experts"]}, ("bf16", None, None)),
        (BNB, ("bnb4", "nf4", None)),
        ({**BNB, "llm_int8_skip_modules": ["lm_head", "mlp"]}, ("bf16", None, None)),
    ],
)  # fmt: skip
def test_integer_methods(block: dict[str, object], wanted: tuple[object, ...]) -> None:
    found = declared_format({"quantization_config": block, "dtype": "bfloat16"}, EXPERT)
    assert (found.format, found.storage, found.group) == wanted


def compressed(**weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("block", "format_name"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_tensor"),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.5.mlp.experts"]}, "bf16"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["mlp.gate", "gate"]}, "fp8_tensor"),
        ({"quant_method": "mxfp8", "ignored_layers": ["model.layers.4"]}, "mxfp8"),
        ({"quant_method": "mxfp8", "ignored_layers": ["model.layers.5"]}, "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "nvfp4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.experts*"]}, "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "fp8_channel"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "fp8_block"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "mxfp8"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "model.layers.5": {"quant_algo": "FP8"},
                    "model.layers.5.mlp.experts": {"quant_algo": "NVFP4"},
                },
            },
            "nvfp4",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"lm_head": {}},
            },
            "bf16",
        ),
        (compressed(type="float", num_bits=8, strategy="tensor"), "fp8_tensor"),
        (compressed(type="float", num_bits=8, strategy="channel"), "fp8_channel"),
        (compressed(type="float", num_bits=8, strategy="block", block_structure=[128, 128]), "fp8_block"),
        (compressed(type="float", num_bits=8, strategy="group", group_size=32), "mxfp8"),
        (compressed(type="float", num_bits=4, strategy="group", group_size=32), "mxfp4"),
        (compressed(type="float", num_bits=4, strategy="tensor_group", group_size=16), "nvfp4"),
        (compressed(type="int", num_bits=4, strategy="group", group_size=128), "int4_group"),
        (
            {
                **compressed(type="int", num_bits=4, strategy="group", group_size=32),
                "ignore": [r"re:.*experts.*"],
            },
            "bf16",
        ),
        (
            {
                **compressed(type="int", num_bits=4, strategy="group", group_size=32),
                "ignore": ["lm_head", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*shared_experts.*"],
            },
            "int4_group",
        ),
    ],
)
def test_declared_formats(block: dict[str, object], format_name: str) -> None:
    config = {"dtype": "bfloat16", "quantization_config": block}
    assert declared_format(config, EXPERT).format == format_name
    assert declared_format({"dtype": "bfloat16", "text_config": {"quantization_config": block}}, EXPERT).format == (
        format_name
    )


def test_deepseek_v4_declares_its_experts_elsewhere() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config: dict[str, object] = {"model_type": "deepseek_v4", "quantization_config": fp8}
    assert declared_format(config, EXPERT).format == "mxfp4"
    assert declared_format({**config, "expert_dtype": "fp8"}, EXPERT).format == "fp8_block"
    nv = {**fp8, "moe_quant_algo": "NVFP4"}
    assert declared_format({**config, "quantization_config": nv}, EXPERT).format == "nvfp4"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "'NVFP4_SVD', known are FP8"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (
            compressed(type="float", num_bits=4, strategy="group", group_size=64),
            "float 4 bits group of 64, known are",
        ),
        (
            compressed(type="int", num_bits=4, strategy="group", group_size=32, symmetric="yes"),
            "symmetric='yes'",
        ),
        (
            compressed(type="int", num_bits=4, strategy="group", group_size=32, actorder="random"),
            "actorder='random'",
        ),
        ({**GPTQ, "bits": 3}, "bits is 3, allowed are 4, 8"),
        ({**GPTQ, "group_size": 0}, "group_size is 0, allowed: 1 to 16777216, or -1"),
        ({**GPTQ, "group_size": 10**30}, "group_size is 10+, allowed"),
        ({"quant_method": "fp8", "weight_block_size": [10**30, 128]}, r"weight_block_size is \[10+, 128\], allowed"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', allowed are 'gptq', 'gptq_v2'"),
        ({**GPTQ, "format": "marlin"}, "format is 'marlin', allowed are 'gptq', 'gptq_v2'"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv', allowed are 'gemm'"),
        ({**AWQ, "version": None, "format": "gemv"}, "format is 'gemv', allowed are 'gemm'"),
        ({**AWQ, "version": None, "checkpoint_format": "gemv"}, "checkpoint_format is 'gemv', allowed are 'gemm'"),
        ({**AWQ, "zero_point": False}, "zero_point is False, allowed are True"),
        ({**BNB, "load_in_4bit": False}, "load_in_4bit is False, allowed are True"),
        ({**BNB, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4', allowed are 'nf4', 'fp4'"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "allowed is a list of module names"),
        ({**compressed(), "ignore": ["re:("]}, "cannot be used"),
    ],
)
def test_bad_quantization(block: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        declared_format({"quantization_config": block}, EXPERT)


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ({"num_bits": 4, "strategy": "group", "group_size": 32}, ("int4_group", None, 32)),
        ({"num_bits": 4, "strategy": "channel", "symmetric": False},
         ("int4_affine", "compressed-tensors-asymmetric", None)),
        ({"num_bits": 4, "strategy": "group", "group_size": 64, "actorder": "group"}, ("int4_ordered", None, 64)),
        ({"num_bits": 4, "strategy": "group", "group_size": 64, "actorder": "weight"}, ("int4_group", None, 64)),
        ({"num_bits": 8, "strategy": "channel"}, ("int8_affine", None, None)),
        ({"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False, "actorder": "group"},
         ("int8_ordered", "compressed-tensors-asymmetric", 32)),
    ],
)  # fmt: skip
def test_compressed_integers(weights: dict[str, object], wanted: tuple[object, ...]) -> None:
    found = declared_format({"quantization_config": compressed(type="int", **weights)}, EXPERT)
    assert (found.format, found.storage, found.group) == wanted


def test_blocks_and_groups_of_other_sizes(tmp_path: Path) -> None:
    from collegium.checkpoint.stored_format import StoredFormat

    declared = declared_format({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}}, EXPERT)
    assert declared.block == (64, 32)
    scale = StoredFormat(name="fp8_block", storage="finegrained-fp8", block=(64, 32)).layout.parts[1]
    assert scale.stored_shape(128, 96) == (2, 3)
    write_checkpoint(tmp_path, "mixtral", "int4_group", size=TinySize(hidden=64, intermediate=64))
    stored = CheckpointLayer.open(Checkpoint.open(tmp_path)).stored
    assert (stored.storage, stored.group, stored.stacked) == ("compressed-tensors", 32, False)


BASE = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
SMALL_MODELS = {
    "Qwen3Moe": {**BASE, "head_dim": 16, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 5,
                 "num_experts_per_tok": 2},
    "Mixtral": {**BASE, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
    "DeepseekV3": {**BASE, "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8,
                   "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
                   "n_shared_experts": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
                   "qk_nope_head_dim": 8, "v_head_dim": 8},
    "GptOss": {**BASE, "head_dim": 16, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", list(SMALL_MODELS))
def test_checkpoints_saved_by_transformers_load(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SMALL_MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = describe_checkpoint(checkpoint)
    layer = moe_layers(checkpoint.config)[-1]
    mlp = model.model.layers[layer].mlp
    weights = load_experts(CheckpointLayer.open(checkpoint, layer), linear(spec.num_experts))
    both, down = mlp.experts.gate_up_proj.detach(), mlp.experts.down_proj.detach()
    if name == "GptOss":
        halves, down = torch.stack((both[..., 0::2].mT, both[..., 1::2].mT), 1), down.mT
        bias = mlp.experts.gate_up_proj_bias.detach()
        assert weights.gate_up_bias is not None
        assert weights.down_bias is not None
        assert torch.equal(weights.gate_up_bias, torch.stack((bias[:, 0::2], bias[:, 1::2]), 1))
        assert torch.equal(weights.down_bias, mlp.experts.down_proj_bias.detach())
    else:
        halves = torch.stack(both.chunk(2, 1), 1)
    assert torch.equal(weights.gate_up.decode(torch.bfloat16), halves)
    assert torch.equal(weights.down.decode(torch.bfloat16), down)
    router, theirs = load_router(CheckpointLayer.open(checkpoint, layer)), mlp.router if name == "GptOss" else mlp.gate
    assert torch.equal(router.weight, theirs.weight.detach())
    if name == "DeepseekV3":
        assert router.correction_bias is not None
        assert torch.equal(router.correction_bias.float(), theirs.e_score_correction_bias.float())
        shared = load_shared(CheckpointLayer.open(checkpoint, layer))
        assert shared is not None
        assert spec.shared is not None
        assert spec.shared.intermediate_size == 48
        assert torch.equal(shared.experts.gate_up.decode()[0, 1], mlp.shared_experts.up_proj.weight.detach().float())
