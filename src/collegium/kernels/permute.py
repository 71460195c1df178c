"""Assignments in expert order by a stable counting sort, and the token tiles of the order.

The row of an assignment is the first row of its expert plus the number of earlier assignments to that expert. Within a
block those are counted in pairs. Up to one block, one program does everything; beyond, the programs of a first kernel
count a range of blocks each, and every program of a second one adds up the counts and writes its range.

An assignment with an id of -1 is dropped. So is one with any other id that is no expert; its slot is -2, which makes
the sum of its token NaN. ``None`` stands for an optional input or output that is absent.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import NOWHERE, pdl_wait

__all__ = ["count_kernel", "permute_kernel", "scatter_kernel"]


class _RowOutputs(NamedTuple):
    """What is written for each row and assignment (``Permutation`` of ``ops/permute.py``); ``weights`` by row."""

    source: Any
    slots: Any
    weights: Any
    row_map: Any


class _RouterWeights(NamedTuple):
    """Weights ``[T, K]``, floating, of which those of a token are adjacent; None: there are none."""

    data: Any
    stride: Any


class _Ranks(NamedTuple):
    """The ranks to whose memory rows return: ``count`` consecutive assignments of each rank, ``width`` elements a row.

    deltas: int64, bytes from this rank's rows to those of each rank.
    """

    deltas: Any
    count: Any
    width: Any


class _TileList(NamedTuple):
    """Expert and first row of each of ``count`` token tiles, and behind the experts ``types.TileRows.used``."""

    expert: Any
    row: Any
    count: Any


@triton.jit
def _experts(ids, assignment, count, experts, id_stride, TOP_K: tl.constexpr):
    """Return the expert of each assignment and the slot it has when dropped: -1 for an id of -1, otherwise -2.

    The expert of a dropped assignment is ``experts``; from ``count`` on it is ``experts + 1``.
    """
    inside = assignment < count
    pointers = ids + (assignment // TOP_K).to(tl.int64) * id_stride + assignment % TOP_K
    # As int64, a large id does not wrap to a small one, and no unsigned id is -1.
    expert_id = tl.load(pointers, mask=inside, other=0).to(tl.int64)
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
    difference = ((first + index)[:, None] ^ first[None, :]) - index[None, :]
    return tl.sum((difference >> 31) & 1, 0)


@triton.jit
def _exclusive_sum(count):
    return tl.cumsum(count, 0) - count


@triton.jit
def _tile_counts(total, BLOCK_T: tl.constexpr):
    """Return the tiles of each expert with ``total`` rows."""
    return (total + BLOCK_T - 1) // BLOCK_T if BLOCK_T else total


@triton.jit
def _write_unused_tiles(tiles: _TileList, needed, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write expert -1 and row 0 to the tiles that no expert needs, and how many are needed (``TileRows.used``)."""
    if BLOCK_T:
        used = tl.sum(needed, 0)
        number = tl.arange(0, 4)
        # One program writes them. The condition is a bound: Triton's interpreter rejects a mask made with a scalar.
        numbers = tl.where(tl.program_id(0) == 0, 3, 0)
        tl.store(tiles.expert + tiles.count + number, tl.where(number == 0, used, 0), mask=number < numbers)
        first = used + tl.program_id(0) * BLOCK_E
        while first < tiles.count:
            tile = first + tl.arange(0, BLOCK_E)
            tl.store(tiles.expert + tile, tl.full([BLOCK_E], -1, tl.int32), mask=tile < tiles.count)
            tl.store(tiles.row + tile, tl.zeros([BLOCK_E], tl.int64), mask=tile < tiles.count)
            first += tl.num_programs(0) * BLOCK_E


@triton.jit
def _write_tiles(tiles: _TileList, first_tile, expert, is_local, order, row, BLOCK_T: tl.constexpr):
    """Write the tiles whose first row is one of ``row``: an expert's rows in steps of BLOCK_T, by expert."""
    if BLOCK_T:
        tile = tl.gather(first_tile, expert, 0) + order // BLOCK_T
        is_first = is_local & (order % BLOCK_T == 0)
        tl.store(tiles.expert + tile, expert, mask=is_first)
        tl.store(tiles.row + tile, row.to(tl.int64), mask=is_first)


@triton.jit
def _write_offsets(expert_offsets, first_row, total, experts, BLOCK_E: tl.constexpr):
    """Write ``expert_offsets [E + 1]``."""
    expert = tl.arange(0, BLOCK_E)
    # The condition of a program goes into a bound: Triton's interpreter rejects a mask made with a scalar.
    inside = expert < tl.where(tl.program_id(0) == 0, experts, 0)
    tl.store(expert_offsets + expert + 1, (first_row + total).to(tl.int64), mask=inside)
    tl.store(expert_offsets + expert, tl.zeros([BLOCK_E], tl.int64), mask=inside & (expert == 0))


@triton.jit
def _write_rows(
    outputs: _RowOutputs,
    weights: _RouterWeights,
    ranks: _Ranks,
    assignment,
    row,
    dropped_slot,
    is_local,
    inside,
    FORMAT: tl.constexpr,
):
    """Write the outputs of ``row`` for ``assignment`` = token * top_k + k, and ``dropped_slot`` where it is dropped."""
    token = (assignment // FORMAT.top_k).to(tl.int64)
    tl.store(outputs.source + row, token, mask=inside)
    tl.store(outputs.slots + assignment, tl.where(is_local, row, dropped_slot).to(tl.int64), mask=inside)
    if weights.data is not None:
        pointers = weights.data + token * weights.stride + assignment % FORMAT.top_k
        weight = tl.load(pointers, mask=is_local, other=0.0).to(tl.float32)
        tl.store(outputs.weights + row, weight, mask=inside)
    if outputs.row_map is not None:
        rank = assignment // ranks.count
        delta = tl.load(ranks.deltas + rank, mask=is_local, other=0)
        offset = delta // FORMAT.element_bytes + (assignment - rank * ranks.count).to(tl.int64) * ranks.width
        tl.store(outputs.row_map + row, tl.where(is_local, offset, NOWHERE), mask=inside)


# Tensors of which kernels read and write single elements, at any alignment.
_UNALIGNED = (
    "ids",
    "weights",
    "slots",
    "expert_offsets",
    "row_map",
    "deltas",
    "tile_expert_a",
    "tile_row_a",
    "tile_expert_b",
    "tile_row_b",
)
_COUNTS = (
    "count",
    "range_size",
    "tiles_a",
    "tiles_b",
    "id_stride",
    "weight_stride",
    "rank_count",
    "row_width",
)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_UNALIGNED)
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
    row_map,
    deltas,
    rank_count,
    row_width,
    count,
    experts,
    tiles_a,
    tiles_b,
    id_stride,
    weight_stride,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the permutation of at most BLOCK assignments, in one program.

    ids: integers ``[T, K]``; count: T * K. Outputs as in ``Permutation`` of ``ops/permute.py``; row_map is its
    ``row_offsets``, computed from ``_Ranks``. FORMAT: a ``PermutationFormat``.
    """
    pdl_wait(PDL)
    assignment = tl.arange(0, BLOCK)
    expert, dropped_slot = _experts(ids, assignment, count, experts, id_stride, FORMAT.top_k)
    total = _counts(expert, experts, FORMAT.block_e)
    order = _ranks(expert, BLOCK)
    inside = expert <= experts
    is_local = expert < experts
    expert = tl.where(is_local, expert, 0)
    # All sums before the first store: stores are not moved, and the sums would wait for each other.
    needed_a = _tile_counts(total, FORMAT.block_t_a)
    needed_b = _tile_counts(total, FORMAT.block_t_b)
    first_row = _exclusive_sum(total)
    first_a = _exclusive_sum(needed_a)
    first_b = _exclusive_sum(needed_b)
    row = tl.where(is_local, tl.gather(first_row, expert, 0), tl.sum(total, 0)) + order
    outputs = _RowOutputs(source=source, slots=slots, weights=weights_by_row, row_map=row_map)
    router_weights = _RouterWeights(data=weights, stride=weight_stride)
    ranks = _Ranks(deltas=deltas, count=rank_count, width=row_width)
    tile_list_a = _TileList(expert=tile_expert_a, row=tile_row_a, count=tiles_a)
    tile_list_b = _TileList(expert=tile_expert_b, row=tile_row_b, count=tiles_b)
    _write_rows(outputs, router_weights, ranks, assignment, row, dropped_slot, is_local, inside, FORMAT)
    _write_tiles(tile_list_a, first_a, expert, is_local, order, row, FORMAT.block_t_a)
    _write_tiles(tile_list_b, first_b, expert, is_local, order, row, FORMAT.block_t_b)
    _write_offsets(expert_offsets, first_row, total, experts, FORMAT.block_e)
    _write_unused_tiles(tile_list_a, needed_a, FORMAT.block_t_a, FORMAT.block_e)
    _write_unused_tiles(tile_list_b, needed_b, FORMAT.block_t_b, FORMAT.block_e)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_UNALIGNED)
def count_kernel(
    ids,
    slots,
    histograms,
    count,
    experts,
    range_size,
    id_stride,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the experts of ``range_size`` assignments a program into ``histograms [programs, BLOCK_E]`` int32.

    slots receives a pair of int32 for ``scatter_kernel``: high, the expert, or the slot of a dropped assignment, -1 or
    -2; low, how many earlier assignments of the range have the same expert, or are dropped.
    """
    pdl_wait(PDL)
    start = tl.program_id(0) * range_size
    stop = tl.minimum(start + range_size, count)
    total = tl.zeros([BLOCK_E], tl.int32)
    dropped = 0
    # while, not range, here and below: the interpreter cannot make an index of a loaded number.
    while start < stop:
        assignment = start + tl.arange(0, BLOCK)
        expert, dropped_slot = _experts(ids, assignment, stop, experts, id_stride, TOP_K)
        is_local = expert < experts
        before = tl.where(is_local, tl.gather(total, tl.where(is_local, expert, 0), 0), dropped)
        high = tl.where(is_local, expert, dropped_slot).to(tl.int64)
        low = (_ranks(expert, BLOCK) + before).to(tl.int64)
        tl.store(slots + assignment, (high << 32) | low, mask=assignment < stop)
        total += _counts(expert, experts, BLOCK_E)
        dropped += tl.sum((expert == experts).to(tl.int32), 0)
        start += BLOCK
    tl.store(histograms + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), total)


@triton.jit
def _sum_histograms(histograms, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return how many assignments each expert has in all ranges, and in those before this program's."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    total = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    first = 0
    while first < tl.num_programs(0):
        program = first + tl.arange(0, BLOCK_P)[:, None]
        counts = tl.load(histograms + program * BLOCK_E + expert, mask=program < tl.num_programs(0), other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(program < tl.program_id(0), counts, 0), 0)
        first += BLOCK_P
    return total, before


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_UNALIGNED)
def scatter_kernel(
    histograms,
    weights,
    source,
    slots,
    expert_offsets,
    weights_by_row,
    tile_expert_a,
    tile_row_a,
    tile_expert_b,
    tile_row_b,
    row_map,
    deltas,
    rank_count,
    row_width,
    count,
    experts,
    tiles_a,
    tiles_b,
    range_size,
    weight_stride,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the permutation of the assignments that ``count_kernel`` counted, with as many programs.

    Arguments as in ``permute_kernel``. BLOCK_P: histograms that are added at once.
    """
    pdl_wait(PDL)
    total, before = _sum_histograms(histograms, FORMAT.block_e, BLOCK_P)
    needed_a = _tile_counts(total, FORMAT.block_t_a)
    needed_b = _tile_counts(total, FORMAT.block_t_b)
    first_row = _exclusive_sum(total)
    first_a = _exclusive_sum(needed_a)
    first_b = _exclusive_sum(needed_b)
    outputs = _RowOutputs(source=source, slots=slots, weights=weights_by_row, row_map=row_map)
    router_weights = _RouterWeights(data=weights, stride=weight_stride)
    ranks = _Ranks(deltas=deltas, count=rank_count, width=row_width)
    tile_list_a = _TileList(expert=tile_expert_a, row=tile_row_a, count=tiles_a)
    tile_list_b = _TileList(expert=tile_expert_b, row=tile_row_b, count=tiles_b)
    start = tl.program_id(0) * range_size
    stop = tl.minimum(start + range_size, count)
    # Dropped assignments come after all others; ``start`` less the others before this range is how many precede it.
    first_dropped = tl.sum(total, 0) + start - tl.sum(before, 0)
    while start < stop:
        assignment = start + tl.arange(0, BLOCK)
        inside = assignment < stop
        pair = tl.load(slots + assignment, mask=inside, other=0)
        high = (pair >> 32).to(tl.int32)
        rank = pair.to(tl.int32)
        is_local = inside & (high >= 0)
        expert = tl.where(is_local, high, 0)
        order = tl.gather(before, expert, 0) + rank
        row = tl.where(is_local, tl.gather(first_row, expert, 0) + order, first_dropped + rank)
        _write_rows(outputs, router_weights, ranks, assignment, row, high, is_local, inside, FORMAT)
        _write_tiles(tile_list_a, first_a, expert, is_local, order, row, FORMAT.block_t_a)
        _write_tiles(tile_list_b, first_b, expert, is_local, order, row, FORMAT.block_t_b)
        start += BLOCK
    _write_offsets(expert_offsets, first_row, total, experts, FORMAT.block_e)
    _write_unused_tiles(tile_list_a, needed_a, FORMAT.block_t_a, FORMAT.block_e)
    _write_unused_tiles(tile_list_b, needed_b, FORMAT.block_t_b, FORMAT.block_e)
