"""Tiny models of classes in transformers whose model types have no file in Collegium."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_cases import BASE, MLA, WIDE

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

IDS = torch.tensor([[3, 9, 27, 5, 40, 11, 62, 8, 33, 21, 4, 17]])
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
CHOSEN = {"num_experts": 8, "num_experts_per_tok": 3}
MIXED = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
# The stem of the class and the config, with every rule of the router and a layer without experts where there are some.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", {**BASE, **WIDE, **CHOSEN, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.7}),
    "laguna": (
        "Laguna",
        # The scale multiplies the sum of the experts.
        {
            **BASE, **WIDE, **CHOSEN, **MIXED, "shared_expert_intermediate_size": 40,
            "moe_routed_scaling_factor": 1.7,
        },
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA", {**BASE, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "aria_text": (
        "AriaText", {**BASE, "intermediate_size": 24, "moe_num_experts": 8, "moe_topk": 3, "moe_num_shared_experts": 2},
    ),
    "hy_v4": ("HYV4", {**BASE, **WIDE, **ROUTED, **MIXED, "swiglu_limit": 0.5}),
    "longcat_flash": (
        "LongcatFlash",
        {
            **BASE, **MLA, "num_hidden_layers": 4, "num_layers": 2, "head_dim": 8, "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24, "n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3,
        },
    ),
    "zaya": ("Zaya", {**BASE, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 1}),
    "jetmoe": (
        "JetMoe",
        {
            "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16,
            "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3, "max_position_embeddings": 64,
        },
    ),
    # Experts have biases.
    "openai_privacy_filter": (
        "OpenAIPrivacyFilter",
        {**BASE, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3, "num_labels": 5},
    ),
    # The shared expert has a gate.
    "qwen4_exp_text": (
        "Qwen4Exp",
        {
            **BASE, **CHOSEN, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
            "layer_types": ["linear_attention", "linear_attention", "indexed_attention"], "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "hc_lowrank": 8,
            "ngram_vocab_size_base": 64, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
            "indexer_budget": 4, "indexer_compress_ratio": 2,
        },
    ),
    "kolibri1": ("Kolibri1", {**BASE, **WIDE, **CHOSEN, "shared_expert_intermediate_size": 24}),
}  # fmt: skip
# Types whose router no rule of Collegium describes: whole models only.
WHOLE_ONLY = ("jetmoe", "kolibri1", "longcat_flash", "zaya")


def build(name: str, path: Path, *, original: bool = True, **changed: Any) -> nn.Module:
    """Return a tiny model of the class with numbers for which every rule counts, saved below ``path``."""
    transformers = pytest.importorskip("transformers")
    stem, entries = CASES[name]
    heads = ("ForCausalLM", "ForTokenClassification")
    cls: Any = next((cls for head in heads if (cls := getattr(transformers, stem + head, None)) is not None), None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {stem}ForCausalLM")
    torch.manual_seed(6)
    model = cls(cls.config_class(**{**entries, **changed})).eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point() or "inv_freq" in key:
                continue
            if tensor.dim() < 2:
                tensor.uniform_(0.3, 1.2)
            else:  # a few large numbers among many small ones
                tensor.copy_(torch.randn(tensor.shape) * (1 + 4 * (torch.rand(tensor.shape) > 0.9)) * 0.15)
    model.save_pretrained(path, save_original_format=original)
    if name == "longcat_flash":  # the class also saves what no token uses, published files do not have it
        file = path / "model.safetensors"
        number = re.compile(r"experts\.(\d+)\.")
        tensors = load_file(file)
        routed = {k: v for k, v in tensors.items() if not (match := number.search(k)) or int(match[1]) < 8}
        save_file(routed, file, metadata={"format": "pt"})
    return model


def blocks(model: nn.Module) -> dict[int, nn.Module]:
    """Return the blocks with experts by layer."""
    named = ((name, module) for name, module in model.named_modules() if hasattr(module, "experts"))
    return {next(int(piece) for piece in name.split(".") if piece.isdigit()): module for name, module in named}
