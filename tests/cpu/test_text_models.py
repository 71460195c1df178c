"""Text models that are published alone, or inside a model that also speaks, against the multimodal class."""

from __future__ import annotations

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
from family_cases import CASES, IDS, build
from text_parts import OUTSIDE, TEXT_OF, save_speaking_model, to_text_checkpoint, to_text_of_speaking_model

if TYPE_CHECKING:
    from pathlib import Path


def _same_logits(ours: Any, theirs: Any) -> None:
    with torch.no_grad():
        found, wanted = ours(IDS).logits, theirs(IDS).logits
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    arguments = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(IDS, **arguments), theirs.generate(IDS, **arguments))


@pytest.mark.parametrize("kind", TEXT_OF)
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_text_models_of_multimodal_classes(tmp_path: Path, kind: str, prefix: str) -> None:
    theirs = build(CASES[TEXT_OF[kind]], tmp_path)
    to_text_checkpoint(tmp_path, kind, prefix)
    ours = load_model_in("fp32", str(tmp_path), device="cpu")
    assert type(ours) is type(theirs)
    assert not [name for name, _ in ours.named_parameters() if OUTSIDE.search(name)]
    _same_logits(ours, theirs)


def test_the_speaking_model_writes_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    thinker = save_speaking_model(tmp_path)
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
    thinker = save_speaking_model(tmp_path)
    to_text_of_speaking_model(tmp_path)
    _same_logits(load_model_in("fp32", str(tmp_path), device="cpu"), thinker)


@pytest.mark.parametrize(("case", "kind"), [("minimax_m3_vl_text", "minimax_m3")])
def test_text_models_under_another_model_type(tmp_path: Path, case: str, kind: str) -> None:
    theirs = build(replace(CASES[case], published=kind), tmp_path)
    _same_logits(load_model_in("fp32", str(tmp_path), device="cpu"), theirs)


def test_step3p7_text_is_read_as_step3p5(tmp_path: Path) -> None:
    theirs = build(CASES["step3p7"], tmp_path)
    to_text_checkpoint(tmp_path, "step3p7_text")
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


def test_image_tokens_take_their_experts(tmp_path: Path) -> None:
    """ERNIE-4.5-VL routes image tokens to experts of another width, which transformers runs."""
    theirs: Any = build(CASES["ernie4_5_vl_moe"], tmp_path)
    ours: Any = load_model_in("fp32", str(tmp_path), device="cpu")
    kinds = torch.zeros_like(IDS)
    kinds[:, 3:7] = 1
    with torch.no_grad():
        text = theirs(IDS).logits
        options = {"mm_token_type_ids": kinds, "moe_mm_token_type_ids": kinds}
        found, wanted = ours(IDS, **options).logits, theirs(IDS, **options).logits
    assert (wanted - text).abs().max() > 1e-2 * text.abs().max()
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_missing_experts_of_images_are_refused(tmp_path: Path) -> None:
    build(CASES["ernie4_5_vl_moe"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.experts.7.up_proj.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.7\.up_proj"):
        load_model(str(tmp_path), device="cpu")
