"""Device functions shared by the product kernels: a step of a sum, token tiles and the rows they read and write.

Token tiles are listed (rows are sorted by expert), or, with few assignments, each assignment is a tile of one row, in
the order of its id: ``tile_expert`` then has the ids themselves, which are checked here.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import enums

__all__ = [
    "NOWHERE",
    "TileRows",
    "dot",
    "output_row_at",
    "pdl_wait",
    "pdl_wait_unless_ready",
    "split_gate_up",
    "store_rows",
    "tile_list_kernel",
    "tile_of",
    "tile_prologue",
    "token_at",
]

NOWHERE = tl.constexpr(enums.NOWHERE)


class TileRows(NamedTuple):
    """The rows of a program: expert (-1: none), first row and count of tokens, and first row of weights."""

    expert: Any
    first: Any
    count: Any
    n_first: Any


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the previous kernel, and let the next one start, which waits in turn."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def pdl_wait_unless_ready(x_ready, PDL: tl.constexpr):
    """Wait for the previous kernel where ``x_ready`` is 0, and let the next one start, which waits in turn.

    Otherwise the caller waits when it needs what the previous kernel wrote, at its end at the latest.
    """
    if PDL:
        if x_ready == 0:
            gdc_wait()
        gdc_launch_dependents()


@triton.jit
def dot(a, b, acc, ASM: tl.constexpr):
    """Return ``acc`` plus ``a [M, K]`` times ``b [K, N]``, in float32.

    ``b`` has 16-bit or E4M3 numbers, as ``a`` has, or float32 numbers: those are multiplied as three products of TF32
    numbers, whose errors are about those of float32.
    """
    if ASM and b.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b, acc, input_precision="tf32x3")
    elif ASM:
        return tl.dot(a, b, acc)
    else:
        # The interpreter multiplies the bit patterns of bfloat16; products of its values are exact in float32.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def split_gate_up(rows, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return gate and up ``[BLOCK_N / 2, BLOCK_T]`` of ``rows [BLOCK_N, BLOCK_T]``, which alternate eight by eight."""
    rows = tl.reshape(rows, (BLOCK_N // 16, 2, 8, BLOCK_T))
    gate, up = tl.split(tl.permute(rows, (0, 2, 3, 1)))
    return tl.reshape(gate, (BLOCK_N // 2, BLOCK_T)), tl.reshape(up, (BLOCK_N // 2, BLOCK_T))


@triton.jit
def tile_of(program, n_tiles, token_tiles, GROUP_T: tl.constexpr):
    """Return token tile and column tile of ``program``: GROUP_T token tiles share a pass over the columns."""
    group = program // (GROUP_T * n_tiles)
    group_size = tl.minimum(token_tiles - group * GROUP_T, GROUP_T)
    index = program - group * GROUP_T * n_tiles
    return group * GROUP_T + index % group_size, index // group_size


@triton.jit
def _load_acquired(pointer):
    """Load an integer, so that later loads of this thread see what was in the L2 cache by then.

    Lines that the L1 cache of this multiprocessor had before are dropped.
    """
    BITS: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth
    if BITS == 64:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [pointer.to(tl.int64)], tl.int64, is_pure=False, pack=1
        )
    elif BITS == 32:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
        return tl.load(pointer)


@triton.jit
def _tile_at(
    tile,
    tile_expert,
    tile_row,
    expert_offsets,
    experts,
    BLOCK_T: tl.constexpr,
    TOP_K: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
):
    """Return expert (-1: none) and first row, both int64, and count of rows of a token tile; TOP_K 0: it is listed.

    EARLY: the previous kernel may still run, so tile lists are read through the L2 cache (.cg): the L1 of this
    multiprocessor may have a stale line. LATE: as in ``tile_prologue``; nothing that is read next may be stale.
    """
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    expert_id = _load_acquired(tile_expert + tile) if LATE else tl.load(tile_expert + tile, cache_modifier=CACHE)
    if TOP_K:
        # Compared before the conversion: truncation must not turn an invalid id into a valid one.
        expert = tl.where((expert_id >= 0) & (expert_id < experts), expert_id, -1).to(tl.int64)
        return expert, tile.to(tl.int64), 1
    else:
        expert = expert_id.to(tl.int64)
        first = tl.load(tile_row + tile, cache_modifier=CACHE)
        stop = tl.load(expert_offsets + tl.maximum(expert, 0) + 1, cache_modifier=CACHE)
        return expert, first, tl.minimum(stop - first, BLOCK_T).to(tl.int32)


@triton.jit
def tile_prologue(
    width,
    token_tiles,
    tile_expert,
    tile_row,
    expert_offsets,
    experts,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Wait for the previous kernel and return this program's ``TileRows``.

    width: rows of a weight matrix. COLUMNS: how many of them a program multiplies. TILE: ``Tile``. LATE: the previous
    kernel has waited for the ones before it, and a program with rows waits for it later, with what it writes.
    """
    tile, n_tile = tile_of(tl.program_id(0), tl.cdiv(width, COLUMNS), token_tiles, TILE.group_t)
    n_first = n_tile * COLUMNS
    if PDL and not (EARLY or LATE):
        gdc_wait()
    expert, first, count = _tile_at(
        tile, tile_expert, tile_row, expert_offsets, experts, TILE.block_t, TOP_K, EARLY, LATE
    )
    if LATE:
        # No kernel may end before those that it follows.
        if expert < 0:
            gdc_wait()
    elif PDL and EARLY:
        gdc_wait()
    if PDL and TOP_K:
        gdc_launch_dependents()
    return TileRows(expert=expert, first=first, count=count, n_first=n_first)


@triton.jit
def token_at(row, source, GATHER: tl.constexpr, TOP_K: tl.constexpr):
    """Return which row of the input each ``row`` reads: itself without GATHER."""
    # One return for each case: what follows a return is compiled all the same.
    if GATHER and TOP_K:
        return row // TOP_K
    elif GATHER:
        return tl.load(source + row)
    else:
        return row


@triton.jit
def output_row_at(row_map, row, DIVISOR: tl.constexpr):
    """Return the offset at which each ``row`` is written, in elements from the start of the result, or NOWHERE.

    DIVISOR: of all entries of the row map: 16, so that 16 bytes are stored at once, or 1.
    """
    return tl.multiple_of(tl.load(row_map + row), DIVISOR)


@triton.jit
def store_rows(result, out, row_map, row, in_rows, first, n, n_out, DIVISOR: tl.constexpr):
    """Store ``result [N, BLOCK_T]``, columns ``first + n`` of each ``row`` that is ``in_rows``, mapped or in order.

    DIVISOR: as in ``output_row_at``, 0 for rows in order.
    """
    offset = output_row_at(row_map, row, DIVISOR)[None, :] if DIVISOR else row[None, :] * n_out
    pointers = out + offset + (first + n)[:, None]
    inside = (n < n_out - first)[:, None] & in_rows[None, :]
    if DIVISOR:
        inside &= offset != NOWHERE
    tl.store(pointers, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["expert_offsets", "tile_expert", "tile_row"])
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
    """Write expert (-1: none) and first row of each token tile: BLOCK_T rows of one expert, in expert order.

    expert_offsets: ``[experts + 1]`` int64. tile_expert: ``[tiles]`` int32. tile_row: ``[tiles]`` int64. used: ``[3]``
    int32, gets the number of tiles that have an expert, and two zeros. Every program counts all experts again, which
    costs less than a second launch.
    """
    expert = tl.arange(0, BLOCK_E)
    valid = expert < experts
    start = tl.load(expert_offsets + expert, mask=valid, other=0)
    stop = tl.load(expert_offsets + expert + 1, mask=valid, other=0)
    count = ((stop - start + BLOCK_T - 1) // BLOCK_T).to(tl.int32)
    last = tl.cumsum(count, 0)
    tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    # An expert precedes a tile if all tiles of the expert do; the sum of their counts is the owner's first tile.
    before = (last[None, :] <= tile[:, None]) & valid[None, :]
    owner = tl.sum(before.to(tl.int32), 1)
    first = tl.sum(tl.where(before, count[None, :], 0), 1)
    has_expert = owner < experts
    row = tl.load(expert_offsets + owner, mask=has_expert, other=0) + (tile - first).to(tl.int64) * BLOCK_T
    inside = tile < tiles
    tl.store(tile_expert + tile, tl.where(has_expert, owner, -1), mask=inside)
    tl.store(tile_row + tile, row, mask=inside)
    counter = tl.arange(0, 4)
    # The first program writes them. The condition is a bound: Triton's interpreter refuses a mask made with a scalar.
    counters = tl.where(tl.program_id(0) == 0, 3, 0)
    tl.store(used + counter, tl.where(counter == 0, tl.sum(count, 0), 0), mask=counter < counters)
