"""The product of large batches, its text compiled as C++: truth, bits of a row, codes and scales, places and NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)

from collegium.experts.triton.grouped import tile_list
from collegium.experts.triton.matrix import PackedMatrix
from collegium.experts.triton.prefill import CodeScales, prefill_gemm
from collegium.experts.triton.tiles import choice as tiles
from collegium.kernels.enums import NOWHERE
from collegium.ops.quantize import activation_format
from collegium.problem import DeviceFacts
from collegium.runtime.machine import Machine
from collegium.testing.compare import relative_error
from collegium.types import ActivationSpec
from decoded_layers import decoded_layer
from five_experts import five_experts, rows_of
from prefill_on_cpu import TILE
from products import grouped_gemm_reference

COUNTS = (0, 300, 3, 0, 65)  # five units in two tiles, one nearly empty, one more than full
ROWS, OWNED = 372, 368
OFFSETS = torch.tensor([0, *COUNTS]).cumsum(0)
SWIGLU = ActivationSpec(limit=2.0)


def tokens(act: str | None, k_in: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return rows, their scales, and what they stand for."""
    x, scale = rows_of(act, k_in, ROWS)
    wide = 1.0 if scale is None else scale.repeat_interleave(k_in if scale.shape[1] == 1 else 128, 1)[:, :k_in]
    return x, scale, x.float() * wide


def run(
    x: torch.Tensor,
    packed: PackedMatrix,
    dtype: torch.dtype,
    offsets: torch.Tensor = OFFSETS,
    **more: Any,
) -> torch.Tensor:
    out = torch.full((ROWS, packed.layout.shape[2]), 7.0, dtype=dtype)
    return prefill_gemm(x, packed, offsets, tile_list(offsets, ROWS, TILE), out, **more)


@pytest.mark.parametrize(
    ("weights", "act", "parts"),
    [
        ("bf16", None, 2),
        ("bf16", None, 1),
        ("fp8_block", "fp8_group128", 2),
        ("fp8_block", "fp8_token", 1),
        ("fp8_channel", "fp8_group128", 1),
        ("fp8_channel", "fp8_token", 2),
    ],
)
def test_truth_and_results_of_16_bits(weights: str, act: str | None, parts: int) -> None:
    packed, values = five_experts(weights, parts, 208, 272, bias=True)
    x, x_scale, meant = tokens(act, 272)
    activation = SWIGLU if parts == 2 else None
    wide = run(x, packed, torch.float32, x_scale=x_scale, activation=activation)
    truth = grouped_gemm_reference(meant, values, OFFSETS, bias=packed.bias, activation=activation)
    assert relative_error(wide[:OWNED], truth[:OWNED]) < 2e-6
    assert bool((wide[OWNED:] == 7.0).all())
    rows = run(x, packed, torch.bfloat16, x_scale=x_scale, activation=activation)
    assert torch.equal(rows, wide.bfloat16())


@pytest.mark.parametrize(("act", "parts"), [("fp8_group128", 2), ("fp8_group128_pow2", 1)])
def test_output_codes_match_quantised_rows(act: str, parts: int) -> None:
    packed, _ = five_experts("fp8_block", parts, 336, 256, bias=False)
    x, x_scale, _ = tokens("fp8_group128", 256)
    x[5] = torch.nan
    activation = ActivationSpec(kind="swiglu" if parts == 2 else "relu2")
    rows = run(x, packed, torch.bfloat16, x_scale=x_scale, activation=activation)
    wanted = activation_format(act).quantize(rows)
    assert wanted.scales is not None
    made = CodeScales(scale=torch.full((ROWS, 3), 7.0), power=act.endswith("pow2"), rounded=True)
    codes = run(x, packed, torch.float8_e4m3fn, x_scale=x_scale, activation=activation, codes=made)
    assert bool(wanted.scales[5].isnan().all())
    torch.testing.assert_close(made.scale[:OWNED], wanted.scales[:OWNED], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codes[:OWNED].view(torch.uint8), wanted.codes[:OWNED].view(torch.uint8))
    assert bool((made.scale[OWNED:] == 7.0).all())
    assert bool((codes[OWNED:].float() == 7.0).all())


def test_rows_are_batch_invariant() -> None:
    packed, _ = five_experts("fp8_block", 2, 208, 272, bias=True)
    x, x_scale, _ = tokens("fp8_group128", 272)
    wanted = run(x, packed, torch.bfloat16, x_scale=x_scale, activation=SWIGLU)
    # The last 40 rows of the second expert alone, and the third one's.
    fewer = torch.tensor([0, 0, 40, 43, 43, 43])
    moved = torch.cat([torch.arange(260, 303), torch.arange(ROWS - 43)])
    x, x_scale = x[moved], None if x_scale is None else x_scale[moved]
    found = run(x, packed, torch.bfloat16, fewer, x_scale=x_scale, activation=SWIGLU)
    assert torch.equal(found[:43], wanted[260:303])
    x[7, 5] = torch.nan
    again = run(x, packed, torch.bfloat16, fewer, x_scale=x_scale, activation=SWIGLU)
    others = torch.arange(43) != 7
    assert bool(again[7].isnan().all())
    assert torch.equal(again[:43][others], found[:43][others])


@pytest.mark.parametrize("n_out", [208, 204])
def test_rows_go_to_their_places(n_out: int) -> None:
    packed, _ = five_experts("bf16", 1, n_out, 272, bias=True)
    x, _, _ = tokens(None, 272)
    wanted = run(x, packed, torch.bfloat16)
    places = torch.randperm(ROWS)
    at = torch.where(places == 3, NOWHERE, places * n_out)
    out = torch.full((ROWS, n_out), 7.0, dtype=torch.bfloat16)
    prefill_gemm(x, packed, OFFSETS, replace(tile_list(OFFSETS, ROWS, TILE), row_offsets=at), out)
    written = places[:OWNED][places[:OWNED] != 3]
    assert torch.equal(out[written], wanted[:OWNED][places[:OWNED] != 3])
    kept = torch.ones(ROWS, dtype=torch.bool)
    kept[written] = False
    assert bool((out[kept] == 7.0).all())


@pytest.mark.parametrize(
    ("name", "group", "sizes"),
    [("fp8_block", 128, (3, 320, 136)), ("bnb4", 64, (3, 128, 320)), ("mxfp8", 128, (3, 96, 192))],
)
def test_weights_that_were_decoded_once(
    name: str, group: int, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "dequantize_threshold", lambda *_: 1)
    monkeypatch.setattr(tiles, "_MIN_K", 8)
    hopper = DeviceFacts(kind="cuda", capability=(9, 0))
    packed, batch, truth = decoded_layer(name, "fp16", group, hopper, tokens=6, sizes=sizes)
    large = replace(packed, machine=Machine(copies=True, compiles=True))
    stop = int(batch.expert_offsets[-1])
    assert large.tiling.large(12) is not None
    assert relative_error(large.run(batch)[:stop], truth[:stop]) < 5e-4
