"""The experiment with clusters of four blocks gives the bits of the kernel it changes, run on the CPU and compiled."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the benchmark compares its bits on the device", allow_module_level=True)

import prefill_on_cpu
from collegium.experts.triton.grouped import tile_list
from collegium.experts.triton.prefill import CodeScales, prefill_gemm
from collegium.runtime.machine import Machine
from collegium.runtime.nvrtc import compiled, nvrtc_found
from collegium.types import ActivationSpec
from experiments.clusters_of_four import changed, source_of, tile_for
from five_experts import five_experts, rows_of
from prefill_on_cpu import FP8, TILE

CODES = {"CODES": 1, "ROUND": 1}
DOWN = {"PARTS": 1, "KIND": -1}
BF16 = {"OPERAND": 1, "SCALE": 0, "X_SCALE": 0}
COUNTS = (450, 300, 3, 0, 65)  # two pairs of tiles, a pair, and experts of one and two units
ROWS = sum(COUNTS) + 4
OFFSETS = torch.tensor([0, *COUNTS]).cumsum(0)


@pytest.mark.parametrize(
    ("weights", "act", "parts", "n_out"),
    [
        ("bf16", None, 2, 336),
        ("fp8_block", "fp8_group128", 2, 208),
        ("fp8_block", "fp8_group128", 1, 600),
    ],
)
def test_bits_of_clusters_of_two(
    weights: str, act: str | None, parts: int, n_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = five_experts(weights, parts, n_out, 272, bias=True)
    x, x_scale = rows_of(act, 272, ROWS)
    more: dict[str, Any] = {"x_scale": x_scale, "activation": ActivationSpec(limit=2.0) if parts == 2 else None}
    codes = [CodeScales(scale=torch.full((ROWS, -(-n_out // 128)), 7.0), power=False, rounded=True) for _ in range(2)]
    found: list[torch.Tensor] = []
    for four, own in enumerate(codes):
        if four:
            two = prefill_on_cpu._text()
            monkeypatch.setattr(prefill_on_cpu, "_text", lambda two=two: "#define BLOCKS 4\n" + changed(two))
        tile = tile_for(Machine()) if four else TILE
        for dtype in (torch.bfloat16, *((torch.float8_e4m3fn,) if act == "fp8_group128" else ())):
            quantised = own if dtype == torch.float8_e4m3fn else None
            out = torch.full((ROWS, n_out), 7.0).to(dtype)
            prefill_gemm(x, packed, OFFSETS, tile_list(OFFSETS, ROWS, tile), out, codes=quantised, **more)
            found.append(out.view(torch.uint8))
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))
    assert torch.equal(codes[0].scale, codes[1].scale)


@pytest.mark.skipif(not nvrtc_found(), reason="needs NVRTC")
@pytest.mark.parametrize("changes", [CODES, BF16 | DOWN, BF16 | {"SCALE": 4}])
def test_it_compiles_without_spills(changes: dict[str, Any]) -> None:
    constants = FP8 | changes
    said = compiled(source_of(constants), "prefill", constants, "--ptxas-options=-v")[1]
    assert "C7510" not in said
    assert "C7511" not in said
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"]
