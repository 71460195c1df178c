"""Assignments in expert order by a stable counting sort, and the token tiles of the order.

A key holds the expert above and the position below, so keys are unique and sorting them is stable. Up to one block
of assignments, one program does everything; beyond, blocks sort themselves, one program adds their histograms up
and lists the tiles, and the blocks scatter.
"""

import triton
import triton.language as tl

__all__ = ["block_sort_kernel", "column_scan_kernel", "permute_kernel", "scatter_kernel"]


@triton.jit
def _sorted_block(ids, start, count, experts, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return sorted keys ``expert * BLOCK + position`` of assignments from ``start`` and the block's histogram."""
    position = tl.arange(0, BLOCK)
    inside = start + position < count
    found = tl.load(ids + start + position, mask=inside, other=0)
    # Compared in the width of the ids: a wide id must not become a small one.
    kept = inside & (found >= 0) & (found < experts)
    # Dropped assignments come behind the last expert, and places without an assignment behind those.
    expert = tl.where(kept, found.to(tl.int32), tl.where(inside, experts, experts + 1))
    histogram = tl.histogram(tl.where(kept, expert, 0), BLOCK_E, mask=kept)
    return tl.sort(expert * BLOCK + position), histogram


@triton.jit
def _write_tiles(tile_expert, tile_row, tiles, first_row, count, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write expert (-1: none) and first row of each token tile: an expert's rows in steps of BLOCK_T, by expert."""
    expert = tl.arange(0, BLOCK_E)
    needed = (count + BLOCK_T - 1) // BLOCK_T
    last = tl.cumsum(needed, 0)
    first = last - needed
    most = tl.max(needed, 0)
    # Here and below while, not range: the interpreter cannot make an index of a loaded number.
    step = 0
    while step < most:
        here = step < needed
        tl.store(tile_expert + first + step, expert, mask=here)
        tl.store(tile_row + first + step, (first_row + step * BLOCK_T).to(tl.int64), mask=here)
        step += 1
    rest = tl.sum(needed, 0)
    while rest < tiles:
        tile = rest + expert
        tl.store(tile_expert + tile, tl.full([BLOCK_E], -1, tl.int32), mask=tile < tiles)
        tl.store(tile_row + tile, tl.zeros([BLOCK_E], tl.int64), mask=tile < tiles)
        rest += BLOCK_E


@triton.jit
def _write_offsets(
    expert_offsets,
    tile_expert_a,
    tile_row_a,
    tile_expert_b,
    tile_row_b,
    experts,
    tiles_a,
    tiles_b,
    count,
    BLOCK_E: tl.constexpr,
    BLOCK_T_A: tl.constexpr,
    BLOCK_T_B: tl.constexpr,
):
    """Write the offsets of experts with ``count`` rows and both tile lists; returns the first row of each expert."""
    expert = tl.arange(0, BLOCK_E)
    stop = tl.cumsum(count, 0)
    first_row = stop - count
    tl.store(expert_offsets + expert + 1, stop.to(tl.int64), mask=expert < experts)
    tl.store(expert_offsets + expert, tl.zeros([BLOCK_E], tl.int64), mask=expert == 0)
    if BLOCK_T_A:
        _write_tiles(tile_expert_a, tile_row_a, tiles_a, first_row, count, BLOCK_T_A, BLOCK_E)
    if BLOCK_T_B:
        _write_tiles(tile_expert_b, tile_row_b, tiles_b, first_row, count, BLOCK_T_B, BLOCK_E)
    return first_row


@triton.jit
def _write_row(source, slots, weights_by_row, weights, assignment, row, kept, inside, top_k, WEIGHTS: tl.constexpr):
    """Write what stands at ``row`` for ``assignment`` = token * top_k + slot."""
    tl.store(source + row, (assignment // top_k).to(tl.int64), mask=inside)
    tl.store(slots + assignment, tl.where(kept, row, -1).to(tl.int64), mask=inside)
    if WEIGHTS:
        weight = tl.load(weights + assignment, mask=kept, other=0.0).to(tl.float32)
        tl.store(weights_by_row + row, weight, mask=inside)


@triton.jit
def permute_kernel(
    ids,
    weights,
    source,
    slots,
    expert_offsets,
    weights_by_row,
    tile_expert_a,
    tile_row_a,
    tile_expert_b,
    tile_row_b,
    count,
    top_k,
    experts,
    tiles_a,
    tiles_b,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T_A: tl.constexpr,
    BLOCK_T_B: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """Write the whole permutation of at most BLOCK assignments; one program. BLOCK_T 0: no tile list."""
    keys, histogram = _sorted_block(ids, 0, count, experts, BLOCK, BLOCK_E)
    row = tl.arange(0, BLOCK)
    kept = keys // BLOCK < experts
    _write_row(source, slots, weights_by_row, weights, keys % BLOCK, row, kept, row < count, top_k, WEIGHTS)
    _write_offsets(
        expert_offsets,
        tile_expert_a,
        tile_row_a,
        tile_expert_b,
        tile_row_b,
        experts,
        tiles_a,
        tiles_b,
        histogram,
        BLOCK_E,
        BLOCK_T_A,
        BLOCK_T_B,
    )


@triton.jit
def block_sort_kernel(ids, keys, histograms, count, experts, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write each block's sorted keys ``[blocks, BLOCK]`` and histogram ``[blocks, BLOCK_E]``, both int32."""
    block = tl.program_id(0)
    found, histogram = _sorted_block(ids, block * BLOCK, count, experts, BLOCK, BLOCK_E)
    tl.store(keys + block * BLOCK + tl.arange(0, BLOCK), found)
    tl.store(histograms + block * BLOCK_E + tl.arange(0, BLOCK_E), histogram)


@triton.jit
def column_scan_kernel(
    histograms,
    bases,
    dropped_bases,
    expert_offsets,
    tile_expert_a,
    tile_row_a,
    tile_expert_b,
    tile_row_b,
    count,
    experts,
    tiles_a,
    tiles_b,
    blocks,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T_A: tl.constexpr,
    BLOCK_T_B: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Turn histograms into ``bases [blocks, BLOCK_E]``: the row of a block's sorted place 0 if it had that expert.

    Row = base + sorted place. dropped_bases ``[blocks]``: the same for dropped assignments. One program.
    """
    expert = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    start = 0
    while start < blocks:
        block = start + tl.arange(0, CHUNK)
        part = tl.load(histograms + block[:, None] * BLOCK_E + expert[None, :], mask=(block < blocks)[:, None], other=0)
        total += tl.sum(part, 0)
        start += CHUNK
    first_row = _write_offsets(
        expert_offsets,
        tile_expert_a,
        tile_row_a,
        tile_expert_b,
        tile_row_b,
        experts,
        tiles_a,
        tiles_b,
        total,
        BLOCK_E,
        BLOCK_T_A,
        BLOCK_T_B,
    )
    dropped = tl.sum(total, 0)
    start = 0
    while start < blocks:
        block = start + tl.arange(0, CHUNK)
        inside = block < blocks
        part = tl.load(histograms + block[:, None] * BLOCK_E + expert[None, :], mask=inside[:, None], other=0)
        before = tl.cumsum(part, 0) - part + first_row[None, :]
        # Sorted places count from the block's first expert, rows from this one's first assignment in the block.
        inner = tl.cumsum(part, 1) - part
        tl.store(bases + block[:, None] * BLOCK_E + expert[None, :], before - inner, mask=inside[:, None])
        first_row += tl.sum(part, 0)
        kept = tl.sum(part, 1)
        held = tl.where(inside, tl.minimum(count - block * BLOCK, BLOCK), 0)
        gone = held - kept
        tl.store(dropped_bases + block, dropped + tl.cumsum(gone, 0) - gone - kept, mask=inside)
        dropped += tl.sum(gone, 0)
        start += CHUNK


@triton.jit
def scatter_kernel(
    keys,
    bases,
    dropped_bases,
    weights,
    source,
    slots,
    weights_by_row,
    count,
    top_k,
    experts,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PART: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """Write source, slots and weights of the sorted places of one block, PART at a time."""
    place = tl.program_id(0) * PART + tl.arange(0, PART)
    block = tl.program_id(0) * PART // BLOCK
    key = tl.load(keys + place)
    expert = key // BLOCK
    kept = expert < experts
    inside = expert <= experts
    base = tl.load(bases + block * BLOCK_E + expert, mask=kept, other=0)
    row = tl.where(kept, base, tl.load(dropped_bases + block)) + place % BLOCK
    assignment = block * BLOCK + key % BLOCK
    _write_row(source, slots, weights_by_row, weights, assignment, row, kept, inside, top_k, WEIGHTS)
