"""Whole models of several layers on disk, their experts quantised by the tools that define the formats."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    # one matrix to its stored tensors by suffix, and the numbers they are
    Convert = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
_COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    # format of the tool, its arguments of the weights
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
         "scale_dtype": torch.float8_e4m3fn},
    ),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_block": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
    "int4_group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "int4_affine": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    ),
    "int8_group": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}),
}  # fmt: skip
_MODELOPT = {"fp8_tensor": "FP8", "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}


def write_model(
    folder: Path, method: str | None = None, form: str | None = None, *, wide: int = 96, hidden: int = 128
) -> Path:
    """Write a Qwen3-MoE of three layers whose experts of width ``wide`` are quantised, and return the folder.

    method: ``compressed-tensors``, ``modelopt``, ``fp8`` (blocks of 128 by 128; ``transformers``: by that package) or
    None for BF16. ``decoded(folder)`` is the same model with the quantised numbers in float32.
    """
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        hidden_size=hidden,
        intermediate_size=96,
        moe_intermediate_size=wide,
        num_experts=5,
        num_experts_per_tok=5,  # all of them: no rounding can choose others
        norm_topk_prob=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                spread = torch.exp(0.7 * torch.randn(*parameter.shape[:-1], 1))
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * spread)
    model.to(torch.bfloat16).save_pretrained(folder)
    if method is not None and form is not None:
        rewrite(folder, *_converter(method, form))
    return folder


def decoded(folder: Path) -> Path:
    """Return where ``rewrite`` put the same model unquantised."""
    return folder.with_name(f"{folder.name}-decoded")


def _converter(method: str, form: str) -> tuple[Convert, dict[str, Any]]:
    if method == "compressed-tensors":
        return _compressed(form)
    if method == "modelopt":
        skip = ["lm_head", "*self_attn*", "*mlp.gate"]
        block = {"quant_method": "modelopt", "quant_algo": _MODELOPT[form], "ignore": skip}
        return lambda weight: _modelopt(form, weight), block
    skip = ["lm_head", "mlp.gate", "q_proj", "k_proj", "v_proj", "o_proj"]
    convert = _finegrained if method == "transformers" else blocks
    return convert, {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skip}


def rewrite(folder: Path, convert: Convert, block: dict[str, Any]) -> None:
    """Quantise the experts of a saved model in place; block: its ``quantization_config``."""
    file, config = folder / "model.safetensors", folder / "config.json"
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        parts, numbers = convert(tensor.float()) if ".experts." in name else ({"weight": tensor}, tensor)
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{suffix}": part.contiguous().clone() for suffix, part in parts.items()}
        plain[name] = numbers.float().contiguous()
    shutil.copytree(folder, decoded(folder))
    save_file(plain, decoded(folder) / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, file, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": block}))


def _compressed(form: str) -> tuple[Convert, dict[str, Any]]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    name, arguments = _COMPRESSED[form]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=name)
    compressor: Any = BaseCompressor.get_value_from_registry(name)

    def convert(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = arguments.get("group_size", weight.shape[1])
        groups = weight.unflatten(1, (-1, size))
        if form == "fp8_block":
            groups = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
        parts: dict[str, Tensor] = {"weight": weight}
        if form == "nvfp4":
            parts["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
        whole = parts.get("weight_global_scale")
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=whole)
        parts |= {"weight_scale": scales, "weight_zero_point": zeros}
        stored = dict(compressor.compress(parts, scheme))
        return stored, compressor.decompress(dict(stored), scheme)["weight"]

    ignore = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    made = QuantizationConfig(config_groups={"group_0": scheme}, format=name, ignore=ignore)
    return convert, {**json.loads(made.model_dump_json()), "quantization_status": "compressed"}


def _modelopt(form: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformers .* is not tested", category=UserWarning)
        from modelopt.torch.export.quant_utils import to_quantized_weight
        from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor

    if form == "nvfp4":
        made, scale, whole = NVFP4QTensor.quantize(weight, 16)
        stored = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
        numbers = made.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
        return {**stored, "input_scale": torch.tensor(0.5)}, numbers
    kind = {"fp8_tensor": "fp8", "fp8_channel": "fp8_pc_pt", "mxfp8": "mxfp8"}[form]
    if form == "mxfp8":
        scale: Any = MXFP8QTensor.get_weights_scaling_factor(weight)
        factor = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    else:
        scale = (weight.abs().amax() if form == "fp8_tensor" else weight.abs().amax(1)) / 448
        factor = scale if form == "fp8_tensor" else scale[:, None]
    codes = to_quantized_weight(weight, scale, kind)
    return {"weight": codes, "weight_scale": scale}, codes.float() * factor


def _finegrained(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 in blocks of 128 by 128 as transformers writes it."""
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    owner = SimpleNamespace(quantization_config=transformers.FineGrainedFP8Config())
    made = Fp8Quantize(owner).convert({"m.weight": weight})
    parts = {name.removeprefix("m."): tensor for name, tensor in made.items()}
    factor = parts["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return parts, parts["weight"].float() * factor


def blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 in blocks of 128 by 128 as DeepSeek publishes it: the last block may be smaller."""
    rows, columns = weight.shape
    padded = functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    split = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = split.abs().amax((1, 3)) / 448
    factor = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (weight / factor).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * factor
