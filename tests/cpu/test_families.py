"""Every family: a toy checkpoint of the model's own class loads, and Collegium's layers compute what the class does.

The classes are those of transformers; families without one there are proved in ``test_families_by_hand``.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from collegium.checkpoint import Checkpoint, audit
from collegium.errors import ConfigError, SpecError
from collegium.loading import load_layer
from collegium.models import FAMILIES, describe, family_of, moe_layers
from family_cases import CASES, IDS, Case, build, decoder

if TYPE_CHECKING:
    from pathlib import Path

    from collegium.layer import MoELayer

transformers = pytest.importorskip("transformers")


def call(case: Case, layer: nn.Module, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return what the class's own block, and a shared expert beside it, makes of ``x [1, T, D]``.

    seen: what the router reads where it has an input of its own.
    """
    block = getattr(layer, case.block)
    if case.stem == "Gemma4":
        _, weights, ids = layer.router(seen[0])
        return block(x[0], ids, weights)[None]
    out = block(x, input_ids=IDS) if "V4" in case.stem else block(x)
    out = out[0] if isinstance(out, tuple) else out
    out = out.reshape(x.shape)
    return out + getattr(layer, case.shared)(x) if case.shared else out


class Swapped(nn.Module):
    """Stands where the block stood."""

    def __init__(self, layer: MoELayer, *, pair: bool) -> None:
        super().__init__()
        self.layer, self.pair = layer, pair

    def forward(self, x: torch.Tensor, *_: object, **others: Any) -> Any:
        ids = others.get("input_ids")
        out = self.layer(x, token_ids=None if ids is None else ids.reshape(-1))
        return (out, None) if self.pair else out


class Router(nn.Module):
    """Keeps what the router was to read, and chooses nothing."""

    def forward(self, x: torch.Tensor) -> Any:
        self.seen = x
        return None, None, None


class Apart(nn.Module):
    """Stands where experts with a router beside them stood."""

    def __init__(self, layer: MoELayer, router: Router) -> None:
        super().__init__()
        self.layer, self.router = layer, router

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        return self.layer(x, router_input=self.router.seen)


class Nothing(nn.Module):
    """A shared expert that the swapped layer already holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Float32 against float32: only the order of sums differs."""
    assert found.shape == wanted.shape
    scale = wanted.abs().max()
    assert scale > 1e-3
    assert (found - wanted).abs().max() <= 2e-5 * scale


def logits(case: Case, model: torch.nn.Module) -> torch.Tensor:
    # Llama4ForConditionalGeneration of transformers 5.24 reads a field that its text model does not return.
    text_model = model.language_model if case.stem == "Llama4" and case.vision is not None else model
    return text_model(IDS).logits


@pytest.mark.each_choice
@pytest.mark.parametrize("original", [True, False], ids=["published", "fused"])
@pytest.mark.parametrize("name", list(CASES))
def test_toy_models_compute_like_their_class(tmp_path: Path, name: str, original: bool) -> None:
    case = CASES[name]
    model = build(case, tmp_path, original=original)
    checkpoint = Checkpoint.open(tmp_path)
    report = audit(checkpoint)
    layers = moe_layers(checkpoint.config)
    assert [layer.layer for layer in report.layers] == list(layers)
    assert all(layer.stored.name == "fp32" for layer in report.layers)
    own = decoder(model)
    x = torch.randn(1, IDS.shape[1], 32)
    loaded = {index: load_layer(tmp_path, index, dtype="fp32", device="cpu") for index in layers}
    with torch.no_grad():
        for index, layer in loaded.items():
            ids = IDS[0] if layer.spec.routing.hash_routing else None
            seen = torch.randn_like(x) if layer.spec.routing.input_norm_eps is not None else None
            close(layer(x, token_ids=ids, router_input=seen), call(case, own[index], x, x if seen is None else seen))
        before = logits(case, model)
        for index, layer in loaded.items():
            if case.stem == "Gemma4":
                own[index].router = Router()
                own[index].experts = Apart(layer, own[index].router)
                continue
            setattr(own[index], case.block, Swapped(layer, pair=case.pair))
            if case.shared:
                setattr(own[index], case.shared, Nothing())
        after = logits(case, model)
    assert (after - before).abs().max() <= 1e-4 * before.abs().max()


def test_every_family_has_a_case() -> None:
    named = [name for name in CASES if any(name in family.model_types for family in FAMILIES)]
    proved = {family_of({"model_type": name}).name for name in named}
    left = {family.name for family in FAMILIES} - proved
    assert {name for name in left if not name.startswith("gguf")} == {"arctic", "step3"}


@pytest.mark.parametrize("name", list(CASES))
def test_wrong_config_entries_raise(name: str) -> None:
    case = CASES[name]
    if not hasattr(transformers, case.stem + case.config):
        pytest.skip(f"transformers {transformers.__version__} has no {case.stem}{case.config}")
    asked = case.text if case.vision is None else {"text_config": case.text, "vision_config": case.vision}
    whole = json.loads(getattr(transformers, case.stem + case.config)(**asked).to_json_string(use_diff=False))
    describe(whole)
    inner = whole.get("text_config") or whole
    wrong: list[Any] = [None, -1, 0, 1 << 70, 2.5, "x", [], ["a"], [[]], {}, {"a": 1}, True]
    spoken = [key for key in inner if re.search(r"moe|expert|layer|mlp|topk|group|hidden|swiglu|rout|ffn|type", key)]
    for key in spoken:
        for bad in wrong:
            changed = {**inner, key: bad}
            config = {**whole, "text_config": changed} if inner is not whole else changed
            try:
                describe(config)
                moe_layers(config)
            except (ConfigError, SpecError):
                continue
