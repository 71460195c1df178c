"""``load_model(weights="dummy")``: whole models with random weights, from ``config.json`` alone."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("transformers")

import derived_cases
from collegium import Overrides, Ranks
from collegium.errors import ConfigError, InputError
from collegium.integrations.transformers import layers_of, load_model
from collegium.integrations.transformers.loading import load_model_in
from collegium.locate import locate
from collegium.types import Routing
from commands import command
from family_cases import CASES, MAIN, build
from quantised_models import write_model
from raising import raises_with
from ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [pytest.param(name, marks=() if name in MAIN else pytest.mark.exhaustive) for name in CASES]
TOKENS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(2))


def remove_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def shapes_of(model: Any) -> dict[str, object]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.shape, tensor.dtype, tensor.device.type) for name, tensor in named}


@pytest.mark.parametrize("name", NAMES)
def test_families_start_without_files(tmp_path: Path, name: str) -> None:
    build(CASES[name], tmp_path)
    files = load_model_in("fp32", tmp_path, device="cpu")
    remove_weights(tmp_path)
    dummy = load_model_in("fp32", tmp_path, device="cpu", weights="dummy")
    assert shapes_of(dummy) == shapes_of(files)
    logits = dummy(TOKENS).logits
    assert logits.shape == files(TOKENS).logits.shape
    assert bool(torch.isfinite(logits).all())
    assert float(logits.std()) > 1e-3
    for mine, other in zip(layers_of(dummy), layers_of(files), strict=True):
        assert mine.plan == other.plan
        assert mine.layer_id == other.layer_id
        assert (mine.after_expert is None) == (other.after_expert is None)


@pytest.mark.parametrize("name", derived_cases.CASES)
def test_derived_families_start_without_files(tmp_path: Path, name: str) -> None:
    derived_cases.build(name, tmp_path)
    files = load_model_in("fp32", tmp_path, device="cpu")
    remove_weights(tmp_path)
    dummy = load_model_in("fp32", tmp_path, device="cpu", weights="dummy")
    assert shapes_of(dummy) == shapes_of(files)
    logits = dummy(derived_cases.IDS).logits
    assert bool(torch.isfinite(logits).all())
    assert float(logits.std()) > 1e-3
    for mine, other in zip(layers_of(dummy), layers_of(files), strict=True):
        assert mine.plan == other.plan
        assert (mine.after_expert is None) == (other.after_expert is None)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "fp8_channel", "int4_group"])
def test_experts_have_the_published_format(tmp_path: Path, form: str) -> None:
    folder = write_model(tmp_path / "model", "compressed-tensors", form)
    files = load_model(folder, device="cpu", overrides=Overrides(kernel="reference"))
    remove_weights(folder)
    dummy: Any = load_model(folder, device="cpu", overrides=Overrides(kernel="reference"), weights="dummy")
    assert [layer.spec for layer in layers_of(dummy)] == [layer.spec for layer in layers_of(files)]
    for mine, other in zip(layers_of(dummy), layers_of(files), strict=True):
        # A config does not give the dtype of integers' scales.
        assert mine.nbytes == pytest.approx(other.nbytes, rel=0.15 if form == "int4_group" else 0)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    ids = torch.arange(64 * 2).view(64, 2) % 5
    for layer in layers_of(dummy):
        out = layer(x, routing=Routing(topk_ids=ids, topk_weights=torch.full((64, 2), 0.5)))
        assert 0.05 < float(out.float().square().mean().sqrt()) < 20
    assert f"weight_format={form}" in repr(dummy)
    other = load_model(folder, device="cpu", weight_format="bf16", weights="dummy")
    assert {layer.spec.weight_format for layer in layers_of(other)} == {"bf16"}


def test_runs_equal_whatever_the_seed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    remove_weights(folder)
    torch.manual_seed(1)
    first = load_model(folder, device="cpu", weights="dummy")
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))
    second = load_model(folder, device="cpu", weights="dummy")
    assert torch.equal(first(TOKENS).logits, second(TOKENS).logits)


def _logits_of_rank(rank: int) -> torch.Tensor:
    torch.manual_seed(rank)
    folder = os.environ["COLLEGIUM_TEST_FOLDER"]
    return load_model(folder, device=Ranks.of(same_tokens=True), weights="dummy")(TOKENS).logits.float()


def test_ranks_share_one_dummy_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", "compressed-tensors", "mxfp4")
    remove_weights(folder)
    whole = load_model(folder, device="cpu", weights="dummy")(TOKENS).logits.float()
    monkeypatch.setenv("COLLEGIUM_TEST_FOLDER", str(folder))
    for logits in run_ranks(_logits_of_rank, 2):
        assert torch.equal(logits, whole)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    with raises_with(InputError, "'random'", "dummy"):
        load_model(folder, device="cpu", weights="random")  # pyright: ignore[reportArgumentType]
    with raises_with(InputError, "adapter-1"):
        load_model(folder, device="cpu", weights="dummy", adapter="adapter-1")
    with raises_with(InputError, "adapter-2"):
        load_model(folder, device="cpu", weights="dummy", adapters=["adapter-1", "adapter-2"])
    (folder / "config.json").unlink()
    with raises_with(ConfigError, "config.json"):
        load_model(folder, device="cpu", weights="dummy")


def test_text_without_weights(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(locate("fables-16m") / name, tmp_path / name)
    code, out, said = command("generate", tmp_path, "--dummy", "--device", "cpu", "--tokens", "5", "--json")
    assert code == 0, said
    assert json.loads(out)["tokens"] > 0
    code, _, said = command("generate", tmp_path, "--device", "cpu", "--tokens", "5")
    assert code == 1
    assert "safetensors" in said
