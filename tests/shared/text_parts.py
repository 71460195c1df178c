"""Checkpoints of text models that are published without their towers, or inside a model that also speaks."""

from __future__ import annotations

import importlib
import json
import re
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from family_cases import decoder, stir
from tiny_configs import tiny_config

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OUTSIDE", "TEXT_OF", "save_speaking_model", "to_text_checkpoint", "to_text_of_speaking_model"]

# The multimodal case of tests/shared/family_cases.py for each model type.
TEXT_OF = {
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe",
    "glm4v_moe_text": "glm4v_moe",
    "glm5_next_text": "glm5_next",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "step3p5": "step3p7",
}
OUTSIDE = re.compile("visual|vision_(?!moe)|vit_|projector|audio|resampler")


def to_text_checkpoint(path: Path, kind: str, prefix: str = "model.") -> None:
    """Turn a multimodal checkpoint into one of its text model, with the published names of a text model."""
    file = path / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not OUTSIDE.search(n)}
    save_file({n.replace("model.language_model.", prefix): t for n, t in tensors.items()}, file, {"format": "pt"})
    entries = json.loads((path / "config.json").read_text())
    text = {key: value for key, value in entries["text_config"].items() if key != "architectures"}
    (path / "config.json").write_text(json.dumps(text | {"model_type": kind}))


def save_speaking_model(path: Path) -> Any:
    """Save the published form of a model that speaks, and return its class for text."""
    torch.manual_seed(3)
    transformers = importlib.import_module("transformers")
    config = tiny_config(transformers, "qwen3_omni_moe_thinker")
    config.vision_start_token_id = 63
    cls = transformers.Qwen3OmniMoeThinkerForConditionalGeneration
    thinker = cls._from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        for layer in decoder(thinker.model.language_model).values():
            stir(layer.mlp)
    thinker.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(file).items()}
    tensors["talker.model.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(24, 32)
    tensors["code2wav.decoder.0.weight"] = torch.zeros(4)
    save_file(tensors, file, {"format": "pt"})
    entries = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": entries}))
    return thinker


def to_text_of_speaking_model(path: Path) -> None:
    """Turn the published form of a model that speaks into a checkpoint of its text model."""
    file = path / "model.safetensors"
    tensors = {n.removeprefix("thinker."): t for n, t in load_file(file).items() if n.startswith("thinker.")}
    save_file(tensors, file, {"format": "pt"})
    entries = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(entries["thinker_config"]))
    to_text_checkpoint(path, "qwen3_omni_moe_text")
