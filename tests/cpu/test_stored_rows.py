"""Rows that the last product stores where their tokens are, with Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from by_kernel import by_kernel
from collegium.experts.triton import grouped as ops
from collegium.experts.triton.packing import pack_plain
from collegium.experts.triton.prefill import prefill_gemm
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.formats import Bf16
from collegium.kernels.enums import NOWHERE
from collegium.ops.permute import Owners, permute
from collegium.testing.compare import heavy_tailed
from prefill_on_cpu import TILE
from ranks import run_ranks
from stored_rows import store

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

SMALL = TileChoice(block_n=64, block_t=16, warps=4, stages=2)


permute_on_device = by_kernel(permute)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_passes_equal_one_rank_bitwise(world: int) -> None:
    assert run_ranks(store, world, seconds=400) == [[]] * world


@pytest.mark.each_choice
@pytest.mark.parametrize(("product", "tile"), [(ops.grouped_gemm, SMALL), (prefill_gemm, TILE)])
@pytest.mark.parametrize("width", [208, 90])
@pytest.mark.parametrize("before", [False, True])
def test_products_store_only_owned_rows(product: Any, tile: TileChoice, width: int, before: bool) -> None:
    counts = (0, 40, 3, 0, 17)
    offsets, rows = torch.tensor([0, *counts]).cumsum(0), 66  # six of them dropped
    packed = pack_plain(Bf16.encode(heavy_tailed(5, 1, width, 64, seed=4)), None)
    x, out = heavy_tailed(rows, 64, seed=3).bfloat16(), torch.empty(rows, width, dtype=torch.bfloat16)
    product(x, packed, offsets, ops.tile_list(offsets, rows, tile), out)
    both = torch.full((2, rows, width), torch.nan, dtype=torch.bfloat16)
    mine, other = both[int(before)], both[1 - int(before)]  # a peer's memory is behind this one, or before
    place = torch.randperm(rows, generator=torch.Generator().manual_seed(2)) * width
    far, lost = torch.arange(rows) % 3 == 0, torch.arange(rows) % 7 == 0
    place = torch.where(far, place + (other.data_ptr() - mine.data_ptr()) // 2, place).masked_fill(lost, NOWHERE)
    product(x, packed, offsets, replace(ops.tile_list(offsets, rows, tile), row_offsets=place), mine)
    kept = (torch.arange(rows) < 60) & ~lost
    found = both.view(-1)
    taken = (place + int(before) * mine.numel())[kept, None] + torch.arange(width)
    assert torch.equal(found[taken], out[kept])
    rest = torch.ones(found.numel(), dtype=torch.bool)
    rest[taken.flatten()] = False
    assert bool(found[rest].isnan().all())


@pytest.mark.parametrize("tokens", [1, 9, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_where_rows_go(tokens: int, dtype: torch.dtype) -> None:
    world, top_k, width = 3, 4, 72
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(world * tokens, 11, generator=generator).argsort(dim=1)[:, :top_k]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -1)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, 1 << 40)
    deltas = torch.tensor([-(1 << 41), 0, 3 << 33, 12345])  # the last one is none's
    owners = Owners(torch.empty(tokens * top_k, width, dtype=dtype), deltas)
    for made in (permute(ids, 11, owners=owners), permute_on_device(ids, 11, owners=owners, block_t=(16, 32))):
        assert made.row_offsets is not None
        wanted = torch.full((ids.numel(),), NOWHERE)
        for assignment, row in enumerate(made.slots.flatten().tolist()):
            rank, own = divmod(assignment, tokens * top_k)
            if row >= 0:
                wanted[row] = int(deltas[rank]) // dtype.itemsize + own * width
        assert torch.equal(made.row_offsets, wanted)
        assert made.row_offsets.dtype == torch.int64
    assert permute_on_device(ids, 11).row_offsets is None
