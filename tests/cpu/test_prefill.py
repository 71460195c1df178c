"""The large-batch product, run by Triton's interpreter on small ugly shapes, against the product of small batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium.errors import InputError
from collegium.formats import by_name
from collegium.ops import grouped_gemm as ops
from collegium.ops.activation import activate
from collegium.ops.pack import pack_fp8_block, pack_fp8_rows, pack_plain
from collegium.ops.prefill import prefill_gemm, prefill_tile
from collegium.ops.quantize import activation_format
from collegium.ops.tiles import TileChoice, TileProblem, machine_of
from collegium.testing.compare import heavy_tailed, relative_error
from collegium.types import ACTIVATION_KINDS, ActivationSpec

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

SMALL = TileChoice(block_n=64, block_t=16, warps=4, stages=2)
LARGE = TileChoice(block_n=128, block_t=128, warps=4, stages=3, group_t=2)
COUNTS = (0, 150, 3, 0, 129)
FORMATS = (
    ("bf16", None),
    ("fp8_block", "fp8_group128"),
    ("fp8_block", "fp8_token"),
    ("fp8_channel", "fp8_group128_pow2"),
    ("fp8_channel", "fp8_token"),
)


def matrix(weights: str, parts: int, n_out: int, k_in: int, *, bias: bool) -> Any:
    values = torch.stack([heavy_tailed(n_out * parts, k_in, seed=5 + e).view(parts, n_out, k_in) for e in range(5)])
    payload = by_name(weights).encode(values / k_in**0.5)
    added = torch.randn(5, parts, n_out).bfloat16() if bias else None
    if weights == "bf16":
        return pack_plain(payload.values, added)
    if weights == "fp8_block":
        return pack_fp8_block(payload, added, native=True)
    return pack_fp8_rows(payload, added, native=True)


def rows_of(act: str | None, k_in: int, count: int = 290) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = heavy_tailed(count, k_in, seed=3).bfloat16()
    if act is None:
        return x, None
    made = activation_format(act).quantize(x)
    return made.codes, made.scales


@pytest.mark.parametrize(("weights", "act"), FORMATS)
@pytest.mark.parametrize("parts", [1, 2])
def test_bits_of_the_small_batch_product(weights: str, act: str | None, parts: int) -> None:
    packed = matrix(weights, parts, 208, 272, bias=weights != "bf16")
    x, x_scale = rows_of(act, 272)
    offsets = torch.tensor([0, *COUNTS]).cumsum(0)
    activation = ActivationSpec(limit=2.0) if parts == 2 else None
    outs = []
    for product, tile in ((ops.grouped_gemm, SMALL), (prefill_gemm, LARGE)):
        out = torch.full((290, 208), 7.0, dtype=torch.bfloat16)
        tiles = ops.tile_list(offsets, 290, tile)
        more = {"programs": 3} if product is prefill_gemm else {}
        outs.append(product(x, packed, offsets, tiles, out, x_scale=x_scale, activation=activation, **more))
    # The interpreter multiplies blocks of other shapes in another order; the bits are compared on a device.
    assert relative_error(outs[1][:282], outs[0][:282]) < 3e-3
    assert bool((outs[1][282:] == 7.0).all())
    assert not bool((outs[1][:282] == 7.0).all(1).any())


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_every_activation(kind: Any) -> None:
    activation = ActivationSpec(kind=kind)
    parts = 1 if kind in ("relu2", "silu", "gelu") else 2
    packed = matrix("bf16", parts, 136, 64, bias=True)
    x = rows_of(None, 64)[0] * 0.25
    offsets = torch.tensor([0, *COUNTS]).cumsum(0)
    out = torch.empty(290, 136, dtype=torch.float32)
    prefill_gemm(x, packed, offsets, ops.tile_list(offsets, 290, LARGE), out, activation=activation, programs=2)
    wanted = ops.grouped_gemm_reference(x, packed.values, offsets, bias=packed.bias, activation=activation)
    assert relative_error(out[:282], wanted[:282]) < 1e-5


@pytest.mark.parametrize("act", ["fp8_group128", "fp8_group128_pow2"])
@pytest.mark.parametrize("parts", [1, 2])
def test_codes_and_scales_of_the_rows_between(act: str, parts: int) -> None:
    """What leaves the first product as codes is what quantising its rows gives."""
    packed = matrix("fp8_block", parts, 336, 256, bias=False)
    x, x_scale = rows_of("fp8_group128", 256)
    offsets = torch.tensor([0, *COUNTS]).cumsum(0)
    tiles = ops.tile_list(offsets, 290, LARGE)
    activation = ActivationSpec(kind="swiglu" if parts == 2 else "relu2")
    rows = torch.empty(290, 336, dtype=torch.bfloat16)
    prefill_gemm(x, packed, offsets, tiles, rows, x_scale=x_scale, activation=activation, programs=2)
    wanted = activation_format(act).quantize(rows)
    assert wanted.scales is not None
    codes, scales = torch.zeros(290, 336, dtype=torch.float8_e4m3fn), torch.zeros(290, 3)
    prefill_gemm(
        x, packed, offsets, tiles, codes, x_scale=x_scale, activation=activation, out_scale=scales,
        power=act.endswith("pow2"), round_first=True, programs=2,
    )  # fmt: skip
    assert torch.equal(scales[:282], wanted.scales[:282])
    # The interpreter rounds to E4M3 toward zero.
    assert relative_error(codes[:282].float(), wanted.codes[:282].float()) < 0.06
