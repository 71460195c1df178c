"""Assignments in expert order by a stable counting sort, and the token tiles of the order.

The row of an assignment is the first row of its expert plus the number of earlier assignments with that expert. Within
a block those are counted in pairs. One program does everything for one block; beyond, the programs of a first kernel
count a run of blocks each, and those of a second one add the counts up, each for itself, and write.

An id of -1 is dropped, and so is any other that is no expert, whose slot is -2: the sum of its token is NaN. With PDL a
kernel may start while the one before it still runs, and waits for it before it touches memory.
"""

import triton
import triton.language as tl

from .tiles import NOWHERE, pdl_wait

__all__ = ["count_kernel", "permute_kernel", "scatter_kernel"]


@triton.jit
def _experts(ids, assignment, count, experts, id_stride, TOP_K: tl.constexpr):
    """Return the expert of each assignment and the slot it has when dropped: -1 for an id of -1, otherwise -2.

    The expert of dropped ones is ``experts``, from ``count`` on ``experts + 1``.
    """
    inside = assignment < count
    at = ids + (assignment // TOP_K).to(tl.int64) * id_stride + assignment % TOP_K
    # In 64 bits a wide id does not become a small one, and no unsigned id is -1.
    expert_id = tl.load(at, mask=inside, other=0).to(tl.int64)
    is_local = (expert_id >= 0) & (expert_id < experts)
    expert = tl.where(inside, tl.where(is_local, expert_id.to(tl.int32), experts), experts + 1)
    return expert, tl.where(expert_id == -1, -1, -2)


@triton.jit
def _counts(expert, experts, BLOCK_E: tl.constexpr):
    """Return how many assignments each expert has."""
    return tl.histogram(tl.where(expert < experts, expert, 0), BLOCK_E, mask=expert < experts)


@triton.jit
def _ranks(expert, BLOCK: tl.constexpr):
    """Return for each assignment how many earlier ones of the block have its expert."""
    index = tl.arange(0, BLOCK)
    first = expert * BLOCK
    # Negative exactly when an earlier assignment has the same expert; summing sign bits avoids predicates.
    apart = ((first + index)[:, None] ^ first[None, :]) - index[None, :]
    return tl.sum((apart >> 31) & 1, 0)


@triton.jit
def _before(count):
    return tl.cumsum(count, 0) - count


@triton.jit
def _needed(total, BLOCK_T: tl.constexpr):
    """Return the tiles of each expert with ``total`` rows."""
    return (total + BLOCK_T - 1) // BLOCK_T if BLOCK_T else total


@triton.jit
def _end_tiles(tile_expert, tile_row, tiles, needed, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Give the tiles that no expert needs expert -1 and row 0."""
    if BLOCK_T:
        rest = tl.sum(needed, 0) + tl.program_id(0) * BLOCK_E
        while rest < tiles:
            tile = rest + tl.arange(0, BLOCK_E)
            tl.store(tile_expert + tile, tl.full([BLOCK_E], -1, tl.int32), mask=tile < tiles)
            tl.store(tile_row + tile, tl.zeros([BLOCK_E], tl.int64), mask=tile < tiles)
            rest += tl.num_programs(0) * BLOCK_E


@triton.jit
def _begin_tiles(tile_expert, tile_row, first_tile, expert, is_local, order, row, BLOCK_T: tl.constexpr):
    """Write the tiles that begin at a row: an expert's rows in steps of BLOCK_T, by expert."""
    if BLOCK_T:
        tile = tl.gather(first_tile, expert, 0) + order // BLOCK_T
        begins = is_local & (order % BLOCK_T == 0)
        tl.store(tile_expert + tile, expert, mask=begins)
        tl.store(tile_row + tile, row.to(tl.int64), mask=begins)


@triton.jit
def _write_offsets(expert_offsets, first_row, total, experts, BLOCK_E: tl.constexpr):
    """Write ``expert_offsets [E + 1]``."""
    expert = tl.arange(0, BLOCK_E)
    # The condition of a program goes into a bound: Triton's interpreter refuses a mask made with a scalar.
    writes = expert < tl.where(tl.program_id(0) == 0, experts, 0)
    tl.store(expert_offsets + expert + 1, (first_row + total).to(tl.int64), mask=writes)
    tl.store(expert_offsets + expert, tl.zeros([BLOCK_E], tl.int64), mask=writes & (expert == 0))


@triton.jit
def _write_rows(
    source, slots, weights_by_row, weights, row_places, deltas, span, width, assignment, row, absent, is_local, inside,
    weight_stride, TOP_K: tl.constexpr, WEIGHTS: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """Write the values of ``row`` for ``assignment`` = token * TOP_K + slot, and ``absent`` where it is not kept.

    ITEM: bytes of an element of the rows that go back, ``width`` to each of ``span`` assignments of a rank; 0: none do.
    """
    token = (assignment // TOP_K).to(tl.int64)
    tl.store(source + row, token, mask=inside)
    tl.store(slots + assignment, tl.where(is_local, row, absent).to(tl.int64), mask=inside)
    if WEIGHTS:
        at = weights + token * weight_stride + assignment % TOP_K
        weight = tl.load(at, mask=is_local, other=0.0).to(tl.float32)
        tl.store(weights_by_row + row, weight, mask=inside)
    if ITEM:
        rank = assignment // span
        delta = tl.load(deltas + rank, mask=is_local, other=0)
        place = delta // ITEM + (assignment - rank * span).to(tl.int64) * width
        tl.store(row_places + row, tl.where(is_local, place, NOWHERE), mask=inside)


# Read and written one number at a time, wherever they are.
_FREE = ("ids", "weights", "slots", "expert_offsets", "row_places", "deltas")
_FREE += ("tile_expert_a", "tile_row_a", "tile_expert_b", "tile_row_b")
_COUNTS = ("count", "run", "tiles_a", "tiles_b", "id_stride", "weight_stride", "span", "width")


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_FREE)
def permute_kernel(
    ids, weights, source, slots, expert_offsets, weights_by_row,
    tile_expert_a, tile_row_a, tile_expert_b, tile_row_b, row_places, deltas, span, width,
    count, experts, tiles_a, tiles_b, id_stride, weight_stride,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T_A: tl.constexpr,
    BLOCK_T_B: tl.constexpr, WEIGHTS: tl.constexpr, ITEM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the whole permutation of at most BLOCK assignments; one program. BLOCK_T 0: no tile list.

    ITEM: row_places too, from ``deltas``, the bytes to each rank's memory (``_write_rows``).
    """
    pdl_wait(PDL)
    assignment = tl.arange(0, BLOCK)
    expert, absent = _experts(ids, assignment, count, experts, id_stride, TOP_K)
    total = _counts(expert, experts, BLOCK_E)
    order = _ranks(expert, BLOCK)
    inside, is_local = expert <= experts, expert < experts
    expert = tl.where(is_local, expert, 0)
    # All sums before the first store: stores keep their place, and the sums would wait for each other.
    needed_a, needed_b = _needed(total, BLOCK_T_A), _needed(total, BLOCK_T_B)
    first_row, first_a, first_b = _before(total), _before(needed_a), _before(needed_b)
    row = tl.where(is_local, tl.gather(first_row, expert, 0), tl.sum(total, 0)) + order
    _write_rows(
        source, slots, weights_by_row, weights, row_places, deltas, span, width, assignment, row, absent, is_local,
        inside, weight_stride, TOP_K, WEIGHTS, ITEM,
    )  # fmt: skip
    _begin_tiles(tile_expert_a, tile_row_a, first_a, expert, is_local, order, row, BLOCK_T_A)
    _begin_tiles(tile_expert_b, tile_row_b, first_b, expert, is_local, order, row, BLOCK_T_B)
    _write_offsets(expert_offsets, first_row, total, experts, BLOCK_E)
    _end_tiles(tile_expert_a, tile_row_a, tiles_a, needed_a, BLOCK_T_A, BLOCK_E)
    _end_tiles(tile_expert_b, tile_row_b, tiles_b, needed_b, BLOCK_T_B, BLOCK_E)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_FREE)
def count_kernel(
    ids, slots, histograms, count, experts, run, id_stride,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the experts of ``run`` assignments a program into ``histograms [programs, BLOCK_E]`` int32.

    slots gets, for ``scatter_kernel``, the expert above and below it how many earlier ones of the run have it; above is
    a dropped assignment's slot, -1 or -2.
    """
    pdl_wait(PDL)
    start = tl.program_id(0) * run
    stop = tl.minimum(start + run, count)
    total = tl.zeros([BLOCK_E], tl.int32)
    dropped = 0
    # Here and below while, not range: the interpreter cannot make an index of a loaded number.
    while start < stop:
        assignment = start + tl.arange(0, BLOCK)
        expert, absent = _experts(ids, assignment, stop, experts, id_stride, TOP_K)
        is_local = expert < experts
        before = tl.where(is_local, tl.gather(total, tl.where(is_local, expert, 0), 0), dropped)
        packed = (tl.where(is_local, expert, absent).to(tl.int64) << 32) | (_ranks(expert, BLOCK) + before).to(tl.int64)
        tl.store(slots + assignment, packed, mask=assignment < stop)
        total += _counts(expert, experts, BLOCK_E)
        dropped += tl.sum((expert == experts).to(tl.int32), 0)
        start += BLOCK
    tl.store(histograms + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), total)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_FREE)
def scatter_kernel(
    histograms, weights, source, slots, expert_offsets, weights_by_row,
    tile_expert_a, tile_row_a, tile_expert_b, tile_row_b, row_places, deltas, span, width,
    count, experts, tiles_a, tiles_b, run, weight_stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T_A: tl.constexpr,
    BLOCK_T_B: tl.constexpr, WEIGHTS: tl.constexpr, ITEM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the permutation of what ``count_kernel`` counted, with as many programs."""
    pdl_wait(PDL)
    column = tl.arange(0, BLOCK_E)[None, :]
    total, before = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    chunk = 0
    while chunk < tl.num_programs(0):
        program = chunk + tl.arange(0, CHUNK)[:, None]
        part = tl.load(histograms + program * BLOCK_E + column, mask=program < tl.num_programs(0), other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where(program < tl.program_id(0), part, 0), 0)
        chunk += CHUNK
    needed_a, needed_b = _needed(total, BLOCK_T_A), _needed(total, BLOCK_T_B)
    first_row, first_a, first_b = _before(total), _before(needed_a), _before(needed_b)
    start = tl.program_id(0) * run
    stop = tl.minimum(start + run, count)
    # Dropped assignments come after all others; of those, start less the kept ones are before this run.
    first_dropped = tl.sum(total, 0) + start - tl.sum(before, 0)
    while start < stop:
        assignment = start + tl.arange(0, BLOCK)
        inside = assignment < stop
        packed = tl.load(slots + assignment, mask=inside, other=0)
        absent, rank = (packed >> 32).to(tl.int32), packed.to(tl.int32)
        is_local = inside & (absent >= 0)
        expert = tl.where(is_local, absent, 0)
        order = tl.gather(before, expert, 0) + rank
        row = tl.where(is_local, tl.gather(first_row, expert, 0) + order, first_dropped + rank)
        _write_rows(
            source, slots, weights_by_row, weights, row_places, deltas, span, width, assignment, row, absent, is_local,
            inside, weight_stride, TOP_K, WEIGHTS, ITEM,
        )  # fmt: skip
        _begin_tiles(tile_expert_a, tile_row_a, first_a, expert, is_local, order, row, BLOCK_T_A)
        _begin_tiles(tile_expert_b, tile_row_b, first_b, expert, is_local, order, row, BLOCK_T_B)
        start += BLOCK
    _write_offsets(expert_offsets, first_row, total, experts, BLOCK_E)
    _end_tiles(tile_expert_a, tile_row_a, tiles_a, needed_a, BLOCK_T_A, BLOCK_E)
    _end_tiles(tile_expert_b, tile_row_b, tiles_b, needed_b, BLOCK_T_B, BLOCK_E)
