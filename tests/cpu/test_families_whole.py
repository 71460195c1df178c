"""Every family as a whole model: ``load_model`` against transformers' own ``from_pretrained`` with eager experts.

Toy checkpoints of several layers, in the published names and in those of transformers, each model called twice.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers")

from collegium.errors import ConfigError
from collegium.integrations.transformers import load_model
from collegium.integrations.transformers.blocks import Block
from collegium.integrations.transformers.whole_model import load_model_in
from collegium.models import FAMILIES
from family_cases import CASES, IDS, build

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

OTHERS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(2))
# Known to the layer but not as a whole model, with what the error says of each.
NOT_WHOLE = {
    "arctic": "does not know this model type",
    "glm4v_moe_text": "no class that writes text",
    "glm5_next_text": "no class that writes text",
    "kimi_k3": "does not know this model type",
    "minimax_m1": "does not know this model type",
    "minimax_m3": "does not know this model type",
    "minimax_text_01": "does not know this model type",
    "minimax_vl_01": "does not know this model type",
    "qwen3_omni_moe": "speech model",
    "qwen3_omni_moe_text": "no class that writes text",
    "qwen3_vl_moe_text": "no class that writes text",
    "step3_text": "does not know this model type",
    "step3_vl": "does not know this model type",
    "step3p5": "no class that writes text",
    "step3p7_text": "does not know this model type",
}


def eager(model: nn.Module, path: Path, dtype: torch.dtype) -> Any:
    """Return what transformers makes of the same files."""
    return type(model).from_pretrained(path, dtype=dtype, experts_implementation="eager")


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer, persistent or not, outside the experts and replaced blocks."""
    replaced = [name for name, module in model.named_modules() if isinstance(module, Block)]
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t for n, t in found.items() if not t.is_meta and not any(n.startswith(r + ".") for r in replaced)}


def same_tensors(ours: nn.Module, theirs: nn.Module) -> None:
    """Everything outside the experts is what transformers makes of it: names, dtypes, devices and bits."""
    mine, wanted = tensors(ours), tensors(theirs)
    blocks = tuple(name + "." for name, module in ours.named_modules() if isinstance(module, Block))
    experts = re.compile(r"\bexperts\.(?!.*norm)")
    left = {n: t for n, t in wanted.items() if not (n.startswith(blocks) and blocks) and not experts.search(n)}
    assert mine.keys() == left.keys()
    for name, tensor in left.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].device == tensor.device, name
        assert torch.equal(mine[name], tensor), name
    assert {n for n, _ in ours.named_buffers()} >= {n for n, _ in theirs.named_buffers() if n in left}


@pytest.mark.parametrize("original", [True, False], ids=["published", "fused"])
@pytest.mark.parametrize("name", list(CASES))
def test_a_whole_model_in_float32_gives_the_logits_of_transformers(tmp_path: Path, name: str, original: bool) -> None:
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


@pytest.mark.parametrize("name", list(CASES))
def test_a_whole_model_in_bf16_is_as_near_to_float32_as_transformers(tmp_path: Path, name: str) -> None:
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
    # The median: a token whose experts change in the last bit of a router says nothing of the rest.
    ours_off, theirs_off = ((t.float() - truth).norm(dim=-1) / truth.norm(dim=-1) for t in (found, wanted))
    assert ours_off.median() <= 1.5 * theirs_off.median() + 1e-3


def test_every_model_type_loads_whole_or_is_refused_by_name() -> None:
    known = {t for family in FAMILIES for t in family.model_types if not t.startswith("gguf:")}
    covered = set(CASES) | {"kimi_k2"}
    assert known - set(NOT_WHOLE) - covered == set()
    assert covered.isdisjoint(NOT_WHOLE)


@pytest.mark.parametrize(("kind", "text"), NOT_WHOLE.items())
def test_a_model_type_that_does_not_load_whole_is_refused_by_name(tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"model_type '{kind}' cannot be loaded as a whole model: .*{text}"):
        load_model(str(tmp_path), device="cpu")


def test_a_model_published_under_another_type_is_read_as_the_class_it_is(tmp_path: Path) -> None:
    own = build(CASES["deepseek_v3"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.X"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2", "auto_map": code}))
    ours = load_model_in("fp32", str(tmp_path), device="cpu")
    with torch.no_grad():
        found, wanted = ours(IDS).logits, own(IDS).logits
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()
