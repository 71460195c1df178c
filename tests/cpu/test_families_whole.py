"""Every family as a whole model: ``load_model`` against transformers' own ``from_pretrained`` with eager experts.

Toy checkpoints of several layers, in the published names and in those of transformers, each model called twice.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers")

from collegium.errors import ConfigError
from collegium.integrations.transformers import load_model
from collegium.integrations.transformers.loading import load_model_in
from collegium.models import FAMILIES
from family_cases import CASES, IDS, MAIN, NOT_WHOLE, TEXT_PARTS, build
from whole_models import as_near_as, eager, same_tensors

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [pytest.param(name, marks=() if name in MAIN else pytest.mark.exhaustive) for name in CASES]
OTHERS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.each_choice
@pytest.mark.parametrize("original", [True, False], ids=["published", "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_models_in_float32(tmp_path: Path, name: str, original: bool) -> None:
    build(CASES[name], tmp_path, original=original)
    ours = load_model_in("fp32", str(tmp_path), device="cpu")
    theirs = eager(ours, tmp_path, torch.float32)
    same_tensors(ours, theirs)
    with torch.no_grad():
        for ids in (IDS, OTHERS):
            found, wanted = ours(ids).logits, theirs(ids).logits
            assert found.dtype == wanted.dtype
            assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()
            assert torch.equal(ours(ids).logits, found)


@pytest.mark.parametrize("name", NAMES)
def test_whole_models_in_bf16(tmp_path: Path, name: str) -> None:
    build(CASES[name], tmp_path)
    ours = load_model(str(tmp_path), device="cpu")
    theirs = eager(ours, tmp_path, torch.bfloat16)
    same_tensors(ours, theirs)
    ids = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(4))
    # No gradient is asked for and none is needed: this runs outside of no_grad.
    found = ours(ids).logits
    with torch.no_grad():
        wanted = theirs(ids).logits
        truth = load_model_in("fp32", str(tmp_path), device="cpu")(ids).logits
    assert not found.requires_grad
    assert found.dtype == wanted.dtype
    as_near_as(found, wanted, truth)


def test_every_model_type_loads_or_refuses() -> None:
    known = {t for family in FAMILIES for t in family.model_types if not t.startswith("gguf:")}
    assert known - set(NOT_WHOLE) - set(CASES) - TEXT_PARTS == set()
    assert set(CASES).isdisjoint({*NOT_WHOLE, *TEXT_PARTS})


@pytest.mark.parametrize(("kind", "text"), NOT_WHOLE.items())
def test_model_types_without_whole_models(tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"model_type '{kind}' cannot be loaded as a whole model: .*{text}"):
        load_model(str(tmp_path), device="cpu")
