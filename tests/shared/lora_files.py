"""Toy models on disk and LoRA adapters of their experts, as PEFT writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save_file

from collegium.testing.compare import heavy_tailed

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = [
    "ALPHA",
    "CONFIG",
    "KINDS",
    "LAYERS",
    "PLAIN",
    "PROJECTIONS",
    "RANK",
    "E",
    "H",
    "model_of",
    "stacks",
    "write",
]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
E, H, LAYERS, RANK, ALPHA = 5, 24, 2, 3, 7.0
PLAIN: dict[str, Any] = {
    "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12,
    "vocab_size": 40, "num_experts_per_tok": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": E, "moe_intermediate_size": 20, "intermediate_size": 20},
    # down is as high as wide
    "gpt_oss": {"num_local_experts": E, "intermediate_size": H},
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "peft_version": "0.21.2", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
    "init_lora_weights": True, "megatron_core": "megatron.core", "qalora_group_size": 16, "use_dora": False,
    "target_modules": ["q_proj"], "rank_pattern": {}, "modules_to_save": None,
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}  # fmt: skip


def model_of(kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Save a toy model with heavy-tailed weights; return it."""
    config = transformers.AutoConfig.for_model(kind, **PLAIN, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            values = heavy_tailed(*parameter.shape, seed=seed, channels=False)
            parameter.copy_(values * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else values)
    model.to(dtype).save_pretrained(folder)
    return model.eval()


def stacks(model: Any) -> dict[str, Tensor]:
    """A and B of every stack and of ``q_proj``, by PEFT's names, and what they add, after PEFT's own einsum."""
    made: dict[str, Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        head = f"base_model.model.model.layers.{layer}."
        wide = block.mlp.experts.down_proj.shape[1 if block.mlp.experts.is_transposed else 2]
        sizes = {
            "mlp.experts.base_layer": (2 * wide, H, E),
            "mlp.experts": (H, wide, E),
            "self_attn.q_proj": (24, H, 1),
        }
        for at, (path, (rows, columns, experts)) in enumerate(sizes.items()):
            seed = 10 * layer + at
            made[f"{head}{path}.lora_A.weight"] = heavy_tailed(experts * RANK, columns, seed=seed)
            made[f"{head}{path}.lora_B.weight"] = heavy_tailed(rows, RANK * experts, seed=seed + 5)
    return made


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder
