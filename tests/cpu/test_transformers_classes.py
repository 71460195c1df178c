"""Every class of the installed transformers that takes an experts implementation, with a small random model of it.

The classes are found in the sources of transformers, so a class that appears with a new release is tested at once. A
config is shrunk by the names of its fields; a class whose fields need more has an entry in EXTRA.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from collegium import SpecError
from collegium.integrations.transformers import experts_modules, register
from collegium.testing.compare import relative_error

MODELS = Path(transformers.__file__).parent / "models"
FOUND = {
    path.parent.name: path.stem
    for path in sorted(MODELS.glob("*/modeling_*.py"))
    if re.search(r"^@use_experts_implementation", path.read_text(encoding="utf-8"), re.MULTILINE)
}
VOCABULARY = 97
SIZES: dict[str, int] = {
    r"(unpadded_)?vocab_size": VOCABULARY,
    r"hidden_size|d_model|moe_hidden_size": 64,
    r"num_hidden_layers|n_layer|num_layers|num_attention_heads|attention_heads": 4,
    r"num_key_value_heads|num_global_key_value_heads|index_n_heads|linear_num_(key_|value_)?heads": 2,
    r"(v_|swa_|global_|index_|indexer_)?head_dim|kv_channels|linear_(key_|value_)?head_dim": 16,
    r"kv_lora_rank|qk_nope_head_dim|qk_rope_head_dim": 16,
    r"q_lora_rank": 24,
    r"intermediate_size|(prefix_)?dense_intermediate_size|mlp_dim|intermediate_size_mlp": 48,
    r"(moe_)?shared_(experts?_)?intermediate_size|expert_ffn_hidden_size": 48,
    r"(moe|expert)_intermediate_size": 32,
    r"max_position_embeddings": 128,
    r"num_local_experts|num_experts|n_routed_experts|moe_num_experts": 8,
    r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|num_selected_experts|moe_router_topk": 2,
    r"n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers": 1,
    r"hidden_size_per_layer_input|vocab_size_per_layer_input": 0,
    r"mamba_d_state": 8,
    r"mamba_n_heads|mamba_num_heads": 4,
    r"mamba_head_dim|mamba_d_head|sliding_window|attention_window": 32,
    r"index_topk": 64,
}
MIXED = ["linear_attention", "full_attention"] * 2
EXTRA: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": MIXED},
    "deepseek_ocr2": {"mlp_layer_types": ["sparse"] * 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "diffusion_gemma": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
    },
    "gemma4": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "glm4v_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    },
    "granitemoehybrid": {"layer_types": MIXED, "mamba_n_heads": 8, "mamba_d_head": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {"layer_types": MIXED},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mistral4": {"head_dim": 32},
    "nemotron_h": {"n_groups": 2, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "qwen4_exp": {
        "layer_types": ["full_attention"] * 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
}


def model_class(folder: str) -> type[PreTrainedModel]:
    module = importlib.import_module(f"transformers.models.{folder}.{FOUND[folder]}")
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == module.__name__
    }
    for end in ("ForCausalLM", "TextModel", "ForTokenClassification", "Model"):
        names = sorted((name for name in own if name.endswith(end)), key=len)
        if names:
            return own[names[0]]
    raise AssertionError(f"{folder}: no model class among {sorted(own)}")


def small_config(folder: str) -> Any:
    kind = model_class(folder).config_class
    wanted: dict[str, Any] = {}
    for field, value in vars(kind()).items():
        name = field.lstrip("_")
        size = next((s for pattern, s in SIZES.items() if re.fullmatch(pattern, name)), None)
        # None where the class has no default, an object where the value differs by layer.
        if size is not None and not isinstance(value, bool | list | dict) and value is not None:
            wanted[name] = min(size, value) if isinstance(value, int) else size
    if "kv_lora_rank" in wanted and "num_key_value_heads" in wanted:
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    config = kind(**(wanted | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | EXTRA.get(folder, {})))
    config._experts_implementation = "eager"
    return config


def small_model(folder: str) -> Any:
    generator = torch.Generator().manual_seed(1)
    model = model_class(folder)._from_config(small_config(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
            elif buffer.dim() == 2 and not buffer.is_floating_point() and "eid" in name:  # a hash table: distinct ids
                rows = [torch.randperm(8, generator=generator)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
                buffer.copy_(torch.stack(rows))
    return model


def run(model: Any, implementation: str, ids: torch.Tensor) -> torch.Tensor:
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=False)
    return out.logits if hasattr(out, "logits") else out[0]


def test_transformers_classes_with_implementations_exist() -> None:
    assert {"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"} <= set(FOUND)


@pytest.mark.parametrize("folder", sorted(FOUND))
def test_every_class_agrees_with_eager(folder: str) -> None:
    register()
    model = small_model(folder)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))
    wanted = run(model, "eager", ids)
    assert experts_modules(model), "the shrunk config has no MoE layer"
    assert relative_error(run(model, "collegium", ids), wanted) < 2e-5
    if not model.can_generate():
        return
    texts = []
    for implementation in ("eager", "collegium"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(ids[:1], max_new_tokens=5, do_sample=False, use_cache=False))
    assert torch.equal(*texts)


# Classes of the families that Collegium knows.
COMPARED = re.findall(
    r"\w+",
    """
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 ernie4_5_moe gemma4 glm4_moe glm4_moe_lite glm4v_moe glm5_next
    glm_moe_dsa gpt_oss granitemoe granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 jamba kimi_linear
    mimo_v2_flash minimax minimax_m2 minimax_m3_vl mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe qwen3_moe
    qwen3_next qwen3_omni_moe qwen3_vl_moe
    """,
)


@pytest.mark.parametrize("folder", [name for name in COMPARED if name in FOUND])
def test_experts_of_every_family_are_found(folder: str, tmp_path: Path) -> None:
    """No wrong refusal in any layout of names, rows and axes; and none of these passes for want of a comparison."""
    register()
    model = small_model(folder).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation="collegium").eval()
    with torch.no_grad():
        loaded(input_ids=torch.randint(3, VOCABULARY, (1, 5)), use_cache=False)
    found = [module._collegium_origin for module in experts_modules(loaded).values()]
    assert found
    assert all(origin.trusted for origin in found)


@pytest.mark.parametrize("folder", ["mixtral", "qwen3_moe", "gpt_oss", "nemotron_h"])
def test_another_expert_order_would_be_noticed(folder: str) -> None:
    register()
    model = small_model(folder)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))
    wanted = run(model, "eager", ids)
    for module in experts_modules(model).values():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.roll(1, 0)
    assert relative_error(run(model, "collegium", ids), wanted) > 1e-2


class _Sizes:
    """As much of a config as transformers' FP8 experts read."""

    hidden_size = 256
    moe_intermediate_size = 128
    num_experts = 5
    hidden_act = "silu"
    swiglu_limit = 3.0
    _experts_implementation = "collegium"


def quantised_experts(kind: str) -> Any:
    from transformers.integrations import finegrained_fp8 as theirs
    from transformers.integrations.moe import use_experts_implementation

    decorated = use_experts_implementation(
        type("Fp8", (theirs.FP8Experts,), {}), experts_interface=theirs.ALL_FP8_EXPERTS_FUNCTIONS
    )
    options: dict[str, Any] = {
        "block": {"block_size": (128, 128)},
        "tensor": {"block_size": None},
        "fp4": {"block_size": (128, 128), "expert_dtype": "fp4", "scale_fmt": "ue8m0"},
    }[kind]
    module: Any = decorated(_Sizes(), **options)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        if name.endswith("scale_inv") and kind == "fp4":
            made = torch.randint(118, 124, parameter.shape, generator=generator, dtype=torch.uint8)
        elif name.endswith("scale_inv"):
            made = torch.rand(parameter.shape, generator=generator) / 64 + 1e-3
        elif kind == "fp4":
            made = torch.randint(0, 256, parameter.shape, generator=generator, dtype=torch.uint8)
        else:
            made = torch.randn(parameter.shape, generator=generator) * 8
        raw = made.view(parameter.dtype) if made.dtype == torch.uint8 else made.to(parameter.dtype)
        parameter.data.copy_(raw)
    return module


def dequantised(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if codes.dtype == torch.int8:
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        levels = torch.cat([levels, -levels])
        bytes_ = codes.view(torch.uint8).int()
        values = torch.stack([levels[bytes_ & 15], levels[bytes_ >> 4]], dim=-1).flatten(-2)
        return values * scale.float().repeat_interleave(32, -1)
    rows, columns = codes.shape[1] // scale.shape[1], codes.shape[2] // scale.shape[2]
    return codes.float() * scale.float().repeat_interleave(rows, 1).repeat_interleave(columns, 2)


@pytest.mark.parametrize("kind", ["block", "tensor", "fp4"])
def test_second_registry_keeps_its_format(kind: str) -> None:
    register()
    module = quantised_experts(kind)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(7, 256, generator=generator)
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator)
    upper = dequantised(module.gate_up_proj.data, module.gate_up_proj_scale_inv.data)
    lower = dequantised(module.down_proj.data, module.down_proj_scale_inv.data)
    wanted = torch.zeros(7, 256)
    for token in range(7):
        for slot in range(2):
            expert = ids[token, slot]
            gate, up = (upper[expert] @ x[token]).chunk(2)
            middle = torch.nn.functional.silu(gate.clamp(max=3.0)) * up.clamp(-3.0, 3.0)
            wanted[token] += weights[token, slot] * (lower[expert] @ middle)
    with torch.no_grad():
        assert relative_error(module(x, ids, weights), wanted) < 1e-5


def test_static_activation_scales_are_refused() -> None:
    register()
    module = quantised_experts("tensor")
    module.activation_scheme = "static"
    with torch.no_grad(), pytest.raises(SpecError, match="static"):
        module(torch.randn(2, 256), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
