"""DeepSeek-V4 as it is published, and other layers whose shared expert has a format of its own, on a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from collegium.loading import load_layer
from collegium.testing.compare import heavy_tailed, relative_error
from commands import command
from published_v4 import HASHED, LAYERS, ROUTED, VOCABULARY, write
from toys import TinySize, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

WIDTH = 512


@pytest.mark.parametrize("kind", list(ROUTED))
def test_the_published_layout_runs(tmp_path: Path, kind: str) -> None:
    toy = write(tmp_path, kind, width=WIDTH, wide=384)
    x = heavy_tailed(33, WIDTH, seed=1).bfloat16()
    ids = torch.randint(0, VOCABULARY, (33,))
    for index in (0, HASHED):
        layer = load_layer(tmp_path, index, device="cuda")
        for tokens in (33, 1, 33):
            wanted = toy.wanted(index, x[:tokens].float(), ids[:tokens])
            given = ids[:tokens].cuda() if index < HASHED else None
            found = layer(x[:tokens].cuda(), token_ids=given).cpu()
            assert relative_error(found, wanted) < 0.01
    code, output, said = command("verify", tmp_path, "--device", "cuda", "--all", "--json")
    assert code == 0, said + output
    rows = json.loads(output)["layers"]
    assert len(rows) == 2 * LAYERS
    assert all(row["kernel"].startswith("triton_") for row in rows)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_group", "fp8_block"])
def test_bf16_shared_expert_with_quantised_experts(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", name, size=TinySize(hidden=WIDTH, intermediate=384, experts=6, layers=3))
    x = heavy_tailed(33, WIDTH, seed=2).bfloat16()
    on_gpu, on_cpu = (load_layer(tmp_path, 2, device=device) for device in ("cuda", "cpu"))
    for tokens in (33, 1, 33):
        assert relative_error(on_gpu(x[:tokens].cuda()).cpu(), on_cpu(x[:tokens])) < 0.01
