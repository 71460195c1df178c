"""Every family as a whole model on a GPU: logits beside transformers' eager ones, and tokens written with a graph.

docs/families.md says which families this covers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("transformers")

from collegium.integrations.transformers import Decoder, load_model
from collegium.integrations.transformers.loading import load_model_in
from family_cases import CASES, FLOAT32_ON_GPU, IDS, build
from whole_models import as_near_as, eager, in_bf16, same_tensors

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = "cuda:0"
# Families whose decode step is known to need nothing from the host.
CAPTURED = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe"}


@pytest.mark.parametrize("name", list(CASES))
def test_whole_models_in_float32(tmp_path: Path, name: str) -> None:
    build(CASES[name], tmp_path)
    ours = load_model_in("fp32", str(tmp_path), device=DEVICE)
    theirs = eager(ours, tmp_path, torch.float32, DEVICE)
    same_tensors(ours, theirs)
    buffers = {name: buffer for name, buffer in ours.named_buffers() if "collegium" not in name}
    assert {buffer.device for buffer in buffers.values()} <= {torch.device(DEVICE)}
    with torch.no_grad():
        for ids in (IDS.to(DEVICE), IDS.flip(1)[:, :5].to(DEVICE)):
            found, wanted = ours(ids).logits, theirs(ids).logits
            assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", [name for name in CASES if name not in FLOAT32_ON_GPU])
def test_whole_models_and_tokens_in_bf16(tmp_path: Path, name: str) -> None:
    build(CASES[name], tmp_path)
    in_bf16(tmp_path)
    ours = load_model(str(tmp_path), device=DEVICE)
    theirs = eager(ours, tmp_path, torch.bfloat16, DEVICE)
    same_tensors(ours, theirs)
    ids = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    with torch.no_grad():
        found = ours(ids).logits
        as_near_as(found, theirs(ids).logits, eager(ours, tmp_path, torch.float32, DEVICE)(ids).logits)
        assert torch.equal(ours(ids).logits, found)
    prompt, decoder = ids[:2, :7], Decoder(ours)
    wanted = Decoder(ours, capture=False).generate(prompt, 8)
    for _ in range(2):
        assert torch.equal(decoder.generate(prompt, 8), wanted)
    assert decoder.captured or name not in CAPTURED


def test_host_synchronising_step_is_not_captured(tmp_path: Path) -> None:
    build(CASES["qwen3_moe"], tmp_path)
    in_bf16(tmp_path)
    model = load_model(str(tmp_path), device=DEVICE)
    prompt = IDS[:, :7].to(DEVICE)
    wanted = Decoder(model).generate(prompt, 8)
    norm: Any = model.model.norm
    norm.register_forward_hook(lambda _m, _i, out: out * float(out.sum() != 0))
    decoder = Decoder(model)
    assert torch.equal(decoder.generate(prompt, 8), wanted)
    assert not decoder.captured
