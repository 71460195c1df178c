"""Models of published sizes with random weights, made tensor by tensor while vLLM loads: no file is read.

``register()`` adds the load format ``random`` to vLLM. Names, shapes and dtypes are those of the published files, so
vLLM's loaders, and what a plug-in hooks into them, run as for a file. One seed gives the same numbers in every process.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["MODELS", "config_of", "register", "tensors", "write_config"]

Named = Iterator[tuple[str, Tensor]]

_E2M1_RMS = 2.926  # of 16 codes drawn evenly
_INT4_RMS = 4.61  # of -8 to 7 drawn evenly
_ROPE = {"rope_theta": 1000000.0, "rope_type": "default"}
_QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu",
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_parameters": _ROPE, "rope_theta": 1000000.0, "attention_bias": False,
    "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# The experts of DeepSeek-V3 (sigmoid, bias, groups, a shared expert) behind an attention that needs no special kernel.
_DEEPSEEK_V3 = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 7168, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 0, "intermediate_size": 18432,
    "num_hidden_layers": 4, "num_attention_heads": 56, "num_key_value_heads": 8, "head_dim": 128, "use_qk_norm": False,
    "vocab_size": 129280, "hidden_act": "silu", "attention_bias": False, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "hidden_act": "silu",
    "swiglu_limit": 7.0, "sliding_window": 128, "max_position_embeddings": 131072, "initial_context_length": 4096,
    "attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False, "rope_theta": 150000,
    },
    "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
# Published sizes, how a linear layer is stored, and the layers that fit a GPU of 80 GB with room for a cache.
MODELS: dict[str, tuple[dict[str, Any], str, int]] = {
    "qwen3_bf16": (_QWEN3, "bf16", 24),
    "qwen3_fp8": (_QWEN3, "fp8", 48),
    "qwen3_nvfp4": (_QWEN3, "nvfp4", 48),
    "qwen3_int4": (_QWEN3, "int4", 48),
    "gptoss20b": (_GPT_OSS, "mxfp4", 24),
    "gptoss120b": ({**_GPT_OSS, "num_local_experts": 128, "num_hidden_layers": 36}, "mxfp4", 18),
    "dsv3_fp8": (_DEEPSEEK_V3, "fp8", 4),
}
_TINY = {
    "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256, "vocab_size": 512, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
}  # fmt: skip


def config_of(name: str, layers: int | None = None, *, tiny: bool = False) -> dict[str, Any]:
    """Return the config of a model; layers: how many it has, by default those that fit 80 GB; tiny: for a CPU."""
    sizes, storage, fitting = MODELS[name]
    config = {**sizes, "num_hidden_layers": layers or fitting}
    if tiny:
        config |= {key: value for key, value in _TINY.items() if key in config}
        experts = next(key for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in config)
        config[experts] = 16
    if config["model_type"] == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[n % 2] for n in range(config["num_hidden_layers"])]
    block = _quantization(storage, config)
    return {**config, "quantization_config": block} if block else config


def _quantization(storage: str, config: dict[str, Any]) -> dict[str, Any]:
    if storage == "fp8":
        linear = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate")
        plain = [f"model.layers.{n}.{part}" for n in range(config["num_hidden_layers"]) for part in linear]
        return {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *plain],
        }  # fmt: skip
    if storage == "nvfp4":
        ignored = ["lm_head", "*self_attn*", "*mlp.gate"]
        kinds = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
        return {**kinds, "ignore": ignored}
    if storage == "int4":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        }  # fmt: skip
    if storage == "mxfp4":
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    return {}


class _Numbers:
    """Random numbers by the name of a tensor."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) * 1009 + self.seed)

    def normal(self, name: str, shape: tuple[int, ...], deviation: float, mean: float = 0.0) -> Tensor:
        made = torch.empty(shape, device=self.device).normal_(mean, deviation, generator=self._generator(name))
        return made.bfloat16()

    def integers(self, name: str, shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self._generator(name), dtype=dtype)


def _bf16(numbers: _Numbers, name: str, shape: tuple[int, int], deviation: float) -> Named:
    yield f"{name}.weight", numbers.normal(name, shape, deviation)


def _fp8(numbers: _Numbers, name: str, shape: tuple[int, int], deviation: float) -> Named:
    rows, columns = shape
    blocks = numbers.normal(name, (rows // 128, 128, columns // 128, 128), deviation).float()
    scale = blocks.abs().amax((1, 3)) / 448
    yield f"{name}.weight", (blocks / scale[:, None, :, None]).view(shape).to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale_inv", scale


def _nvfp4(numbers: _Numbers, name: str, shape: tuple[int, int], deviation: float) -> Named:
    rows, columns = shape
    yield f"{name}.weight", numbers.integers(name, (rows, columns // 2), 0, 256, torch.uint8)
    scales = numbers.normal(f"{name}.scale", (rows, columns // 16), 8, 64).clamp(16, 112)
    yield f"{name}.weight_scale", scales.to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale_2", torch.tensor(deviation / _E2M1_RMS / 64, device=numbers.device)
    yield f"{name}.input_scale", torch.tensor(0.01, device=numbers.device)


def _int4(numbers: _Numbers, name: str, shape: tuple[int, int], deviation: float) -> Named:
    rows, columns = shape
    packed = numbers.integers(name, (rows, columns // 2), 0, 256, torch.uint8).view(torch.int32)
    yield f"{name}.weight_packed", packed
    yield (
        f"{name}.weight_scale",
        numbers.normal(f"{name}.scale", (rows, columns // 128), 0.1, 1) * deviation / _INT4_RMS,
    )
    yield f"{name}.weight_shape", torch.tensor(shape, device=numbers.device)


_LINEAR: dict[str, Callable[[_Numbers, str, tuple[int, int], float], Named]] = {
    "bf16": _bf16, "fp8": _fp8, "nvfp4": _nvfp4, "int4": _int4,
}  # fmt: skip


def tensors(config: dict[str, Any], device: torch.device, seed: int = 0) -> Named:
    """Yield the checkpoint's tensors in the order of the layers."""
    numbers = _Numbers(device, seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    block = config.get("quantization_config", {})
    storage = {"fp8": "fp8", "modelopt": "nvfp4", "compressed-tensors": "int4"}.get(
        block.get("quant_method", ""), "bf16"
    )
    yield "model.embed_tokens.weight", numbers.normal("embed", (vocab, hidden), 1.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", numbers.normal(f"{at}.{norm}", (hidden,), 0.05, 1.0)
        yield from _attention(numbers, config, f"{at}.self_attn")
        if config["model_type"] == "gpt_oss":
            yield from _gpt_oss_experts(numbers, config, f"{at}.mlp")
        else:
            yield from _experts(numbers, config, f"{at}.mlp", storage)
    yield "model.norm.weight", numbers.normal("norm", (hidden,), 0.05, 1.0)
    yield "lm_head.weight", numbers.normal("lm_head", (vocab, hidden), 1.5 * hidden**-0.5)


def _attention(numbers: _Numbers, config: dict[str, Any], at: str) -> Named:
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden), "o": (hidden, heads)}
    for which, (rows, columns) in shapes.items():
        gain = 0.5 if which == "o" else 1.0
        yield from _bf16(numbers, f"{at}.{which}_proj", (rows, columns), gain * columns**-0.5)
        if config["attention_bias"]:
            yield f"{at}.{which}_proj.bias", numbers.normal(f"{at}.{which}.bias", (rows,), 0.05)
    if config["model_type"] == "gpt_oss":
        yield f"{at}.sinks", numbers.normal(f"{at}.sinks", (config["num_attention_heads"],), 1.0)
    if config["model_type"] == "qwen3_moe":
        for which in ("q", "k"):
            yield f"{at}.{which}_norm.weight", numbers.normal(f"{at}.{which}_norm", (size,), 0.05, 1.0)


def _experts(numbers: _Numbers, config: dict[str, Any], at: str, storage: str) -> Named:
    hidden, middle = config["hidden_size"], config["moe_intermediate_size"]
    count = config.get("num_experts") or config["n_routed_experts"]
    linear = _LINEAR[storage]
    yield f"{at}.gate.weight", numbers.normal(f"{at}.gate", (count, hidden), 2 * hidden**-0.5)
    names = [f"experts.{expert}" for expert in range(count)]
    if config.get("n_shared_experts"):
        yield f"{at}.gate.e_score_correction_bias", numbers.normal(f"{at}.bias", (count,), 0.01).float()
        names.append("shared_experts")
    for name in names:
        for which in ("gate_proj", "up_proj"):
            yield from linear(numbers, f"{at}.{name}.{which}", (middle, hidden), hidden**-0.5)
        yield from linear(numbers, f"{at}.{name}.down_proj", (hidden, middle), 2 * middle**-0.5)


def _gpt_oss_experts(numbers: _Numbers, config: dict[str, Any], at: str) -> Named:
    hidden, middle, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield f"{at}.router.weight", numbers.normal(f"{at}.router", (count, hidden), 2 * hidden**-0.5)
    yield f"{at}.router.bias", numbers.normal(f"{at}.router.bias", (count,), 0.2)
    exponent = 127 - round(math.log2(_E2M1_RMS * hidden**0.5))  # the E8M0 byte near hidden ** -0.5 / rms
    for which, rows, columns in (("gate_up", 2 * middle, hidden), ("down", hidden, middle)):
        name = f"{at}.experts.{which}_proj"
        groups = (count, rows, columns // 32)
        yield f"{name}_blocks", numbers.integers(name, (*groups, 16), 0, 256, torch.uint8)
        yield f"{name}_scales", numbers.integers(f"{name}.scales", groups, exponent - 1, exponent + 1, torch.uint8)
        yield f"{name}_bias", numbers.normal(f"{name}.bias", (count, rows), 0.1)


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """Write ``config.json`` and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return str(folder)


def register() -> None:
    """Add the load format ``random`` to vLLM in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("random")
    class RandomLoader(BaseModelLoader):
        """Loads random tensors under the names of the model's config."""

        def download_model(self, model_config: Any) -> None:
            """Nothing is downloaded."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            config = json.loads((Path(model_config.model) / "config.json").read_text())
            model.load_weights(tensors(config, next(model.parameters()).device))
