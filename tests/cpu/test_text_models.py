"""Text models that are published alone, or inside a model that also speaks, against the multimodal class."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from collegium.commands.generate import check_writable
from collegium.errors import ConfigError, MissingTensorError
from collegium.integrations.transformers import load_model
from collegium.integrations.transformers.loading import load_model_in
from family_cases import CASES, IDS, build, decoder, stir
from tiny_configs import tiny_config

if TYPE_CHECKING:
    from pathlib import Path

_TEXT_OF = {
    "glm4v_moe": "glm4v_moe_text",
    "glm5_next": "glm5_next_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "step3p7": "step3p5",
}
_OUTSIDE = re.compile("visual|vision|vit_|projector|audio")


def _text_checkpoint(path: Path, kind: str, prefix: str = "model.") -> None:
    """Turn a multimodal checkpoint into one of its text model, with the published names of a text model."""
    file = path / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not _OUTSIDE.search(n)}
    save_file({n.replace("model.language_model.", prefix): t for n, t in tensors.items()}, file, {"format": "pt"})
    entries = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(entries["text_config"] | {"model_type": kind}))


def _same_logits(ours: Any, theirs: Any) -> None:
    with torch.no_grad():
        found, wanted = ours(IDS).logits, theirs(IDS).logits
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    arguments = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(IDS, **arguments), theirs.generate(IDS, **arguments))


@pytest.mark.parametrize("outer", _TEXT_OF)
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_text_models_of_multimodal_classes(tmp_path: Path, outer: str, prefix: str) -> None:
    theirs = build(CASES[outer], tmp_path)
    _text_checkpoint(tmp_path, _TEXT_OF[outer], prefix)
    ours = load_model_in("fp32", str(tmp_path), device="cpu")
    assert type(ours) is type(theirs)
    assert not [name for name, _ in ours.named_parameters() if _OUTSIDE.search(name)]
    _same_logits(ours, theirs)


def test_the_speaking_model_writes_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    thinker = _thinker(tmp_path)
    _same_logits(load_model_in("fp32", str(tmp_path), device="cpu"), thinker)
    assert [record.levelname for record in caplog.records if "thinker." in record.getMessage()] == ["WARNING"]
    # One of the tensors that write text is missing.
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("thinker.model.norm.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(MissingTensorError):
        load_model(str(tmp_path), device="cpu")


def test_the_thinker_without_speech(tmp_path: Path) -> None:
    thinker = _thinker(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {n.removeprefix("thinker."): t for n, t in load_file(file).items() if n.startswith("thinker.")}
    save_file(tensors, file, {"format": "pt"})
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entries["thinker_config"]))
    _text_checkpoint(tmp_path, "qwen3_omni_moe_text")
    _same_logits(load_model_in("fp32", str(tmp_path), device="cpu"), thinker)


def _thinker(path: Path) -> Any:
    """Save the published form of a model that speaks, and return its class for text."""
    torch.manual_seed(3)
    transformers = importlib.import_module("transformers")
    config = tiny_config(transformers, "qwen3_omni_moe_thinker")
    config.vision_start_token_id = 63
    thinker = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()
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


@pytest.mark.parametrize(("case", "kind"), [("minimax_m3_vl_text", "minimax_m3")])
def test_text_models_under_another_model_type(tmp_path: Path, case: str, kind: str) -> None:
    theirs = build(replace(CASES[case], published=kind), tmp_path)
    _same_logits(load_model_in("fp32", str(tmp_path), device="cpu"), theirs)


def test_step3p7_text_is_read_as_step3p5(tmp_path: Path) -> None:
    theirs = build(CASES["step3p7"], tmp_path)
    _text_checkpoint(tmp_path, "step3p7_text")
    _same_logits(load_model_in("fp32", str(tmp_path), device="cpu"), theirs)


def test_a_text_model_without_a_head(tmp_path: Path) -> None:
    whole = build(CASES["qwen3_vl_moe"], tmp_path / "whole")
    text: Any = whole.model.language_model  # pyright: ignore[reportAttributeAccessIssue]
    text.save_pretrained(tmp_path / "text")
    ours = load_model_in("fp32", str(tmp_path / "text"), device="cpu")
    with torch.no_grad():
        found, wanted = ours(IDS)[0], text(IDS)[0]
    assert found.shape == (1, 11, 32)
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    with pytest.raises(ConfigError, match="Qwen3VLMoeTextModel"):
        check_writable(str(tmp_path / "text"))
