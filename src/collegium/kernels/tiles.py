"""The list of token tiles, from the expert offsets, on the device."""

import triton
import triton.language as tl

__all__ = ["tile_list_kernel"]


@triton.jit(
    do_not_specialize=["tiles"],
    do_not_specialize_on_alignment=["expert_offsets", "tile_expert", "tile_row"],
)
def tile_list_kernel(
    expert_offsets,
    tile_expert,
    tile_row,
    used,
    experts,
    tiles,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Write expert (-1: none) and first row of each token tile: an expert's rows in steps of BLOCK_T, by expert.

    used gets the number of tiles that have an expert.
    Every program counts all experts again, which costs less than a second launch.
    """
    expert = tl.arange(0, BLOCK_E)
    valid = expert < experts
    start = tl.load(expert_offsets + expert, mask=valid, other=0)
    stop = tl.load(expert_offsets + expert + 1, mask=valid, other=0)
    count = ((stop - start + BLOCK_T - 1) // BLOCK_T).to(tl.int32)
    last = tl.cumsum(count, 0)
    tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    # An expert lies before this tile when all its tiles do; the sum of their counts is where the owner starts.
    before = (last[None, :] <= tile[:, None]) & valid[None, :]
    owner = tl.sum(before.to(tl.int32), 1)
    first = tl.sum(tl.where(before, count[None, :], 0), 1)
    found = owner < experts
    row = tl.load(expert_offsets + owner, mask=found, other=0) + (tile - first).to(tl.int64) * BLOCK_T
    written = tile < tiles
    tl.store(tile_expert + tile, tl.where(found, owner, -1), mask=written)
    tl.store(tile_row + tile, row, mask=written)
    tl.store(used, tl.sum(count, 0), mask=tl.program_id(0) == 0)
