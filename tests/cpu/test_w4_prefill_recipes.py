"""The large-batch product of every four-bit recipe, its text compiled as C++: truth, every code and scale, layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)

from collegium.experts.reference import Reference
from collegium.experts.triton.grouped import tile_list
from collegium.experts.triton.table import TABLE, TritonW4A16
from collegium.experts.triton.tiles.choice import prefill_tile
from collegium.experts.triton.tiles.fitted import LARGE
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.experts.triton.w4_prefill import w4_prefill_gemm
from collegium.formats import Int4Group, MxFp4, NvFp4
from collegium.formats.int_affine import Int4Affine
from collegium.ops.operand import transpose_scales
from collegium.ops.quantize import REORDERED, reorder_codes
from collegium.parallel.local import Local
from collegium.problem import DeviceFacts, Problem
from collegium.runtime.machine import Machine, machine_of
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ActivationSpec, MoESpec, Routing, RoutingSpec
from grids import mainly
from integers import encoded
from products import grouped_gemm_reference
from w4_recipes import RECIPES, Rows

TILE = TileChoice(block_n=256, block_t=160, warps=8, stages=5, group_t=2, programs=2)  # of one cluster
SPLIT_SCALED = replace(TILE, block_t=112)  # NVFP4 where K blocks of tokens have scales
COUNTS = (0, 190, 3, 0, 65)  # tiles of 96 and 16 tokens, an expert with a single tile of 80, two without rows
ROWS, OWNED = 260, 258
OFFSETS = torch.tensor([0, *COUNTS]).cumsum(0)
NEW = [name for name in RECIPES if not name.startswith("mxfp4:fp8")]  # test_w4_prefill.py compares those
MAIN = ("mxfp4:bf16", "nvfp4:bf16", "nvfp4:fp8", "nvfp4:fp8_group128", "int4_affine_32:bf16", "int4_32:bf16")


def run(packed: Any, rows: Any, offsets: torch.Tensor, dtype: torch.dtype, **more: Any) -> torch.Tensor:
    count = rows.x.shape[0]
    out = torch.full((count, packed.layout.shape[2]), 7.0, dtype=dtype)
    scaled = rows.scale is not None and rows.scale.shape[1] > 1
    tiles = tile_list(offsets, count, SPLIT_SCALED if scaled else TILE)
    return w4_prefill_gemm(rows.x, packed, offsets, tiles, out, x_scale=rows.scale, **more)


@pytest.mark.parametrize("recipe", mainly(NEW, MAIN))
def test_matches_truth(recipe: str) -> None:
    """Gate and up of weight rows that end inside of a row tile, over K blocks of which the last is not whole."""
    n_out, k_in = 208, 272
    weights = torch.stack([heavy_tailed(2 * n_out, k_in, seed=5 + e).view(2, n_out, k_in) for e in range(5)])
    payload = RECIPES[recipe].encode(weights / k_in**0.5)
    packed = RECIPES[recipe].pack(payload, torch.randn(5, 2, n_out).bfloat16())
    rows = RECIPES[recipe].rows(heavy_tailed(ROWS, k_in, seed=3))
    activation = ActivationSpec(limit=2.0)
    found = run(packed, rows, OFFSETS, torch.float32, activation=activation)
    truth = grouped_gemm_reference(rows.values, payload.decode(), OFFSETS, bias=packed.bias, activation=activation)
    assert relative_error(found[:OWNED], truth[:OWNED]) < 2e-6
    assert bool((found[OWNED:] == 7.0).all())


def test_narrow_tiles_have_same_bits() -> None:
    """Tiles of at most 80 tokens leave room for more stages."""
    values = torch.stack([heavy_tailed(72, 784, seed=5 + e).view(1, 72, 784) for e in range(5)])
    packed = RECIPES["mxfp4:bf16"].pack(MxFp4.encode(values), None)
    rows = RECIPES["mxfp4:bf16"].rows(heavy_tailed(ROWS, 784, seed=3))
    out = torch.full((ROWS, 72), 7.0)
    narrow = tile_list(OFFSETS, ROWS, replace(TILE, block_t=80))
    w4_prefill_gemm(rows.x, packed, OFFSETS, narrow, out, x_scale=None)
    assert torch.equal(out, run(packed, rows, OFFSETS, torch.float32))


@pytest.mark.parametrize("recipe", mainly(NEW, ("mxfp4:bf16", "nvfp4:fp8")))
def test_one_part_and_rows_alone(recipe: str) -> None:
    """More K blocks than stages, weights beyond one block of threads, and an expert's rows in a smaller batch."""
    n_out, k_in = 264, 784
    weights = torch.stack([heavy_tailed(n_out, k_in, seed=5 + e).view(1, n_out, k_in) for e in range(5)])
    payload = RECIPES[recipe].encode(weights / k_in**0.5)
    packed = RECIPES[recipe].pack(payload, None)
    rows = RECIPES[recipe].rows(heavy_tailed(ROWS, k_in, seed=3))
    found = run(packed, rows, OFFSETS, torch.bfloat16)
    truth = grouped_gemm_reference(rows.values, payload.decode(), OFFSETS)
    assert relative_error(found[:OWNED], truth[:OWNED]) < 4e-3
    # The last 40 rows of the second expert alone, and the third one's.
    fewer, moved = torch.tensor([0, 0, 40, 43, 43, 43]), torch.arange(150, 193)
    scale = None if rows.scale is None else rows.scale[moved]
    if scale is not None and scale.shape[1] > 1:
        scale = transpose_scales(scale, None)
    alone = rows._replace(x=rows.x[moved], scale=scale)
    assert torch.equal(run(packed, alone, fewer, torch.bfloat16), found[150:193])


def _every_code(columns: int, group: int) -> torch.Tensor:
    """Return codes ``[64, columns]``, pairs in a byte, with the largest magnitude first in every group."""
    codes = torch.arange(columns).repeat(64, 1) % 16
    codes[:, ::group] = 7
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)[None, None]


def _payload(recipe: str) -> Any:
    """Return weights ``[1, 1, 64, 128]`` with every code, and scales of many sizes."""
    shape, row = (1, 1, 64, 128), torch.arange(64)[:, None]
    if recipe == "mxfp4:bf16":
        scales = 127 - (row + 4 * torch.arange(4)) % 60
        return MxFp4(codes=_every_code(128, 32), scales=scales.to(torch.uint8)[None, None], shape=shape)
    if recipe == "nvfp4:fp8":
        # Within 2^-10 of the row's largest, which is 448 or less.
        scales = (0x70 - (5 * row + 9 * torch.arange(8)) % 78).to(torch.uint8)
    else:
        scales = ((5 * row + 9 * torch.arange(8)) % 0x7F).to(torch.uint8)  # subnormal numbers too
    return NvFp4(
        codes=_every_code(128, 16),
        scales=scales.view(torch.float8_e4m3fn)[None, None],
        global_scale=torch.ones(1, 1),
        shape=shape,
    )


@pytest.mark.parametrize("recipe", ["mxfp4:bf16", "nvfp4:bf16", "nvfp4:fp8"])
def test_every_code_and_scale(recipe: str) -> None:
    """Weights are exact: each column is multiplied by itself, with one token for each."""
    payload = _payload(recipe)
    packed = RECIPES[recipe].pack(payload, None)
    eye = torch.eye(128)
    rows = Rows(eye.bfloat16(), None, eye)
    if recipe == "nvfp4:fp8":
        rows = Rows(reorder_codes(eye.to(torch.float8_e4m3fn), REORDERED), torch.ones(128, 1), eye)
    found = run(packed, rows, torch.tensor([0, 128]), torch.float32)
    assert torch.equal(found.T, payload.decode()[0, 0])


@pytest.mark.parametrize("zeros", [False, True])
def test_every_integer(zeros: bool) -> None:
    """The first column of each group is multiplied, so the sum is in the units of its group: exact."""
    codes = (torch.arange(128) // 32 * 5 + torch.arange(64)[:, None]) % 16
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)[None, None]
    scales = torch.ones(1, 1, 64, 4, dtype=torch.bfloat16)
    zero = ((torch.arange(64)[:, None] // 16 * 3 + torch.arange(4)) % 16).to(torch.uint8)[None, None]
    form: Any = Int4Affine if zeros else Int4Group
    more = {"zeros": zero} if zeros else {}
    payload = form(codes=pairs, scales=scales, group_size=32, shape=(1, 1, 64, 128), **more)
    recipe = "int4_affine_32:bf16" if zeros else "int4_32:bf16"
    packed = RECIPES[recipe].pack(payload, None)
    rows = RECIPES[recipe].rows(torch.eye(128))
    found = run(packed, rows, torch.tensor([0, 128]), torch.float32)
    assert torch.equal(found.T, payload.decode()[0, 0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["int4_ordered", *mainly(("mxfp4",), ())])
def test_layers_of_large_batches(name: str, weighted: bool) -> None:
    spec = MoESpec(
        hidden_size=256,
        intermediate_size=128,
        num_experts=5,
        routing=RoutingSpec(top_k=2),
        activation=ActivationSpec(kind="swiglu_oai", limit=2.0),
        weight_format=name,
        expert_bias=True,
    )
    problem = Problem(spec=spec, device=DeviceFacts(kind="cuda", capability=(9, 0)), activation_format="bf16")
    weights = encoded(random_experts(5, 2, 128, 256, seed=1, bias=True), name, 64)
    small = TritonW4A16().pack(weights, problem.routed)
    large = replace(small, machine=Machine(copies=True, compiles=True), forced="large")
    ids = uneven_ids(60, 2, 5, seed=2)
    ids[0, 0] = -1
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(60, 2))
    batch = Local(num_experts=5).dispatch(heavy_tailed(60, 256, seed=3).bfloat16(), routing)[0]
    if weighted:
        batch = replace(batch, input_weights=torch.rand(120) + 0.5)
    stop = int(batch.expert_offsets[-1])
    assert small.tiling.large(120) is None
    assert large.tiling.large(120) is not None
    truth = Reference().pack(weights, replace(problem, activation_format="fp32").routed).run(batch)[:stop]
    assert relative_error(large.run(batch)[:stop], truth) < 6e-3


def test_which_batches_are_large() -> None:
    hopper = machine_of((9, 0), 132)
    shape = (256, 2, 512, 1024)
    for kernel, weights, tokens, bits in (
        ("triton_w4a16", "mxfp4", "bf16", 16),
        ("triton_w4a16", "nvfp4", "bf16", 16),
        ("triton_w4a16", "int4_group", "bf16", 16),
        ("triton_w4a16", "int4_affine", "bf16", 16),
        ("triton_w4a8", "nvfp4", "fp8_token", 8),
    ):
        row = next(row for row in TABLE[kernel] if row.weights == weights and tokens in row.tokens)
        layout = row.layout.of(shape)
        assert layout.in_registers
        assert layout.dequantized_bytes == 0
        least = 256 * LARGE.four_bits
        tile = prefill_tile(layout.problem(least, bits, False), hopper)
        assert tile is not None
        assert (tile.block_n, tile.block_t) == (256, 160)
        assert prefill_tile(layout.problem(least - 1, bits, False), hopper) is None
        assert prefill_tile(layout.problem(least, bits, False), machine_of((9, 0), 132, nvrtc=False)) is None
        assert not row.layout.of((256, 2, 516, 1024)).in_registers, "rows of results that are not aligned"
        if bits == 16:
            assert not row.layout.of(shape, half=True).in_registers, "float16 tokens"
            assert not row.layout.of((256, 2, 512, 1028)).in_registers, "rows of tokens that are not aligned"
    split = next(row for row in TABLE["triton_w4a8"] if row.weights == "nvfp4").layout.of(shape)
    tile = prefill_tile(split.problem(256 * LARGE.four_bits, 8, True), hopper)
    assert tile is not None
    assert tile.block_t == 112, "registers for both operands of a weight, and for products of pieces"
    for name in ("bnb4", "gguf"):
        row = next(row for row in TABLE["triton_w4a16"] if row.weights == name)
        assert not row.layout.of(shape).in_registers
