"""Write the small random models of the vLLM tests, each beside the same numbers in float32: models.py FOLDER."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from quantised_matrices import E2M1, KINDS, quantise
from quantised_models import SIZES, write_model
from tracked import ROOT

# Packed by the tools that define the formats: method, and the tool's name of the format.
BY_TOOL = {
    "fp8_block": ("transformers", "fp8_block"),
    "fp8_block_compressed": ("compressed-tensors", "fp8_block"),
    "fp8_channel": ("compressed-tensors", "fp8_channel"),
    "mxfp4_compressed": ("compressed-tensors", "mxfp4"),
    "nvfp4_compressed": ("compressed-tensors", "nvfp4"),
    "int4_group": ("compressed-tensors", "int4_group"),
    "int4_affine": ("compressed-tensors", "int4_affine"),
    "int8_group": ("compressed-tensors", "int8_group"),
    "fp8_tensor": ("modelopt", "fp8_tensor"),
    "mxfp8": ("modelopt", "mxfp8"),
    "nvfp4_modelopt": ("modelopt", "nvfp4"),
}
# Packed by the tests' own arithmetic; docs/vllm.md says why.
BY_HAND = {"gptq": "gptq", "awq": "awq"}
_DYNAMIC = {
    "fp8_channel": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "fp8_block_compressed": {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True, "symmetric": True
    },
}  # fmt: skip


def _configured(folder: Path) -> None:
    """Add what vLLM reads of a quantisation block and Collegium does not need."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    block = config["quantization_config"]
    for group in block.get("config_groups", {}).values():
        if folder.name in _DYNAMIC:
            group["input_activations"] = _DYNAMIC[folder.name]
    if folder.name == "nvfp4_modelopt":
        block |= {"group_size": 16, "kv_cache_quant_algo": None}
    if folder.name == "fp8_block":
        names = [name.removesuffix(".weight") for name in load_file(folder / "model.safetensors")]
        plain = [name for name in names if ".experts." not in name]  # vLLM wants whole names
        block |= {"activation_scheme": "dynamic", "modules_to_not_convert": plain}
    file.write_text(json.dumps(config))


def _gpt_oss(folder: Path) -> None:
    """A gpt-oss of two layers, biases and sinks included, quantised by the command and then by ModelOpt."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "head_dim": 64}
    config = transformers.GptOssConfig(
        **sizes, hidden_size=256, intermediate_size=256, num_local_experts=4, num_experts_per_tok=4,
        max_position_embeddings=512, sliding_window=64, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = parameter.shape[-2] if "experts" in name and parameter.dim() == 3 else parameter.shape[-1]
            spread = wide**-0.5 if parameter.dim() > 1 and "bias" not in name else 0.3
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * spread)
    model.to(torch.bfloat16).save_pretrained(folder / "gpt_oss")
    made, plain = folder / "gpt_oss_mxfp4", folder / "gpt_oss_mxfp4-decoded"
    command = [sys.executable, "-m", "collegium", "quantize", folder / "gpt_oss", "--to", "mxfp4", "--out", made]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    shutil.copytree(folder / "gpt_oss", plain)
    numbers = load_file(plain / "model.safetensors")
    experts = {name: numbers[name].float().mT for name in numbers if name.endswith("_proj") and "experts" in name}
    for file in made.glob("*.safetensors"):  # the names and the config are the command's, the bytes are ModelOpt's
        stored = load_file(file)
        for name, weight in experts.items():
            if f"{name}_blocks" in stored:
                own, scales = MXFP4QTensor.quantize(weight.contiguous(), 32)
                codes, scales = own._quantized_data.unflatten(-1, (-1, 16)), scales.view(*weight.shape[:2], -1)
                assert codes.shape == stored[f"{name}_blocks"].shape
                stored |= {f"{name}_blocks": codes.contiguous(), f"{name}_scales": scales.contiguous()}
                values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
                numbers[name] = (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).mT.contiguous()
        save_file(stored, file, metadata={"format": "pt"})
    numbers = {name: tensor.float() for name, tensor in numbers.items()}
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})


def _broken(folder: Path) -> None:
    """The shipped model without one expert's tensor, and AWQ with a scale that is infinite."""
    for name, source in (("missing", ROOT / "demo" / "fables-16m"), ("infinite", folder / "awq")):
        shutil.copytree(source, folder / name)
        tensors = load_file(folder / name / "model.safetensors")
        if name == "missing":
            del tensors["model.layers.3.mlp.experts.5.up_proj.weight"]
        else:
            tensors["model.layers.1.mlp.experts.2.down_proj.scales"][0, 0] = torch.inf
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})


def main(folder: Path) -> None:
    """Write every model into ``folder``, under its name; what was there is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, (method, form) in BY_TOOL.items():
        torch.manual_seed(0)
        write_model(folder / name, method, form, wide=256, hidden=256)
    for name, kind in BY_HAND.items():
        torch.manual_seed(0)
        quantise(write_model(folder / name, wide=256, hidden=256), KINDS[kind], lambda path: ".experts." in path)
    for name in (*BY_TOOL, *BY_HAND):
        _configured(folder / name)
    _gpt_oss(folder)
    _broken(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
