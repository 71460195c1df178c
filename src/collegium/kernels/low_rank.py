"""Low-rank changes of rows that have an adapter (LoRA): ``scale * B @ (A @ x)``, added to a product's float32 sums.

``low_rank_kernel`` computes ``scale * A @ x`` of each row before a product starts, in token tiles of the product: a
program takes 16 ranks of one projection, and each adapter that occurs in its tile once. The product kernels call
``add_low_rank``, which multiplies by B before the activation, and leaves rows without an adapter alone.

Sums over columns and ranks run in one order, so the bits of a row do not depend on the rest of a batch.
"""

import triton
import triton.language as tl

from .tiles import dot, pdl_wait

__all__ = ["adapter_at", "add_low_rank", "low_rank_kernel"]

NO_ADAPTER = tl.constexpr(-1)
UNKNOWN_ADAPTER = tl.constexpr(-2)
NO_MORE = tl.constexpr(2147483647)
RANKS = tl.constexpr(16)  # multiplied at once


@triton.jit
def adapter_at(adapters, row, row_count, TOP_K: tl.constexpr):
    """Return the adapter of each ``row``: its number, NO_ADAPTER, or UNKNOWN_ADAPTER for an id that is no adapter.

    adapters: ``AdapterRows``. row_count: how many of the rows exist; the others have none. TOP_K: as in ``RowOrder``.
    """
    token = row // TOP_K if TOP_K else tl.load(adapters.source + row)
    # Compared before the conversion: truncation must not turn an invalid id into a valid one.
    adapter_id = tl.load(adapters.ids + token, mask=tl.arange(0, row.shape[0]) < row_count, other=-1)
    known = (adapter_id >= 0) & (adapter_id < adapters.count)
    absent = tl.where(adapter_id == -1, NO_ADAPTER, UNKNOWN_ADAPTER)
    return tl.where(known, adapter_id.to(tl.int32), absent)


@triton.jit
def _next_adapter(adapter, previous):
    """Return the smallest number in ``adapter`` above ``previous``, NO_MORE where there is none."""
    return tl.min(tl.where(adapter > previous, adapter, NO_MORE), 0)


@triton.jit
def _exact_dot(a, b, acc):
    """Return ``acc`` plus ``a`` times float32 ``b``, rounded to float32 alone."""
    return tl.dot(a.to(tl.float32), b, acc, input_precision="ieee")


@triton.jit
def _matrix_at(adapters, adapter, projection, PROJECTIONS: tl.constexpr):
    """Return rank and first elements of A and B of an adapter's projection; experts follow each other."""
    entry = adapters.table + (adapter.to(tl.int64) * PROJECTIONS + projection) * 3
    rank = tl.load(entry).to(tl.int32)
    return rank, tl.multiple_of(tl.load(entry + 1), 16), tl.multiple_of(tl.load(entry + 2), 16)


@triton.jit
def add_low_rank(
    acc,
    adapters,
    adapter,
    expert,
    row,
    column,
    n_out,
    PROJECTION: tl.constexpr,
    PROJ: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return ``acc [N, BLOCK_T]`` float32, plus B times the inner rows where a row has an adapter.

    adapters: ``AdapterRows``. adapter, row: ``[BLOCK_T]``, the result of ``adapter_at`` and the rows. column: ``[N]``
    columns of the product. PROJ: ``Projections``. An unknown adapter makes its row NaN.
    """
    inside = (column < n_out)[:, None]
    inner = adapters.inner + (row * PROJ.count + PROJECTION)[None, :] * PROJ.adapter_rank
    current = tl.where(expert < adapters.experts, _next_adapter(adapter, NO_ADAPTER), NO_MORE)
    while current < NO_MORE:
        rank, _, first = _matrix_at(adapters, current, PROJECTION, PROJ.count)
        b_ptr = adapters.b + first + expert * rank * n_out + column[:, None]
        selected = adapter == current
        change = tl.zeros_like(acc)
        for start in range(0, rank, RANKS):
            r = start + tl.arange(0, RANKS)
            b = tl.load(b_ptr + r[None, :] * n_out, mask=inside & (r < rank)[None, :], other=0.0)
            t = tl.load(inner + r[:, None], mask=selected[None, :] & (r < rank)[:, None], other=0.0)
            if b.dtype == tl.bfloat16:
                # Two terms of bfloat16 have 16 bits of the float32 number.
                upper = t.to(tl.bfloat16)
                lower = (t - upper.to(tl.float32)).to(tl.bfloat16)
                change = dot(b, upper, change, ASM)
                change = dot(b, lower, change, ASM)
            else:
                change = _exact_dot(b, t, change)
        acc = tl.where(selected[None, :], acc + change, acc)
        current = _next_adapter(adapter, current)
    return tl.where((adapter == UNKNOWN_ADAPTER)[None, :], float("nan"), acc)


@triton.jit
def _sum_over_columns(
    a_ptr, x_ptr, r_inside, selected, k_in, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, ASM: tl.constexpr
):
    """Return ``[RANKS, BLOCK_T]``: rows of A from ``a_ptr [RANKS, 1]`` times rows at ``x_ptr [1, BLOCK_T]``.

    DEPTH blocks are read before the first is multiplied: a small batch waits for memory, not for products.
    """
    acc = tl.zeros((RANKS, x_ptr.shape[1]), dtype=tl.float32)
    for k_first in tl.range(0, k_in, DEPTH * BLOCK_K, num_stages=3):
        operands = ()
        for index in tl.static_range(DEPTH):
            k = k_first + index * BLOCK_K + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + k[None, :], mask=r_inside[:, None] & (k < k_in)[None, :], other=0.0)
            x = tl.load(x_ptr + k[:, None], mask=(k < k_in)[:, None] & selected[None, :], other=0.0)
            operands += ((a, x),)
        for index in tl.static_range(DEPTH):
            a, x = operands[index]
            acc = _exact_dot(a, x, acc) if x.dtype == tl.float32 else dot(a, x, acc, ASM)
    return acc


@triton.jit(do_not_specialize_on_alignment=["input_weights", "expert_offsets", "tile_expert", "tile_row"])
def low_rank_kernel(
    x,
    adapters,
    scale,
    input_weights,
    expert_offsets,
    tile_expert,
    tile_row,
    x_stride,
    k_in,
    PROJECTIONS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``adapters.inner [R, PROJECTIONS, RANK]``: scale times A times x, for rows that have an adapter.

    x: rows of tokens (GATHER) or rows in order, ``[., x_stride]``. adapters: ``AdapterRows``; a: ``[experts, rank,
    k_in]`` of each adapter and projection. scale: float32 ``[adapters, PROJECTIONS, experts]``. input_weights: float32
    ``[R]``, factors of the rows, or None. tile_expert, tile_row, expert_offsets: token tiles of TILE_T rows, or with
    TOP_K the ids. Entries of ranks that an adapter lacks are not written, nor are rows without an adapter.
    """
    pdl_wait(PDL)
    BLOCKS: tl.constexpr = (TILE_T + BLOCK_T - 1) // BLOCK_T
    program = tl.program_id(0)
    block = program % BLOCKS
    tile = program // BLOCKS
    r_first = tl.program_id(1) % (RANK // RANKS) * RANKS
    projection = tl.program_id(1) // (RANK // RANKS)
    expert_id = tl.load(tile_expert + tile)
    known = (expert_id >= 0) & (expert_id < adapters.experts)
    expert = tl.where(known, expert_id, -1).to(tl.int64)
    if expert < 0:
        return
    if TOP_K:
        first = tile.to(tl.int64)
        count = 1
    else:
        first = tl.load(tile_row + tile) + block * BLOCK_T
        stop = tl.load(expert_offsets + expert + 1)
        count = tl.minimum(stop - first, TILE_T - block * BLOCK_T).to(tl.int32)
    t = tl.arange(0, BLOCK_T)
    row = first + tl.where(t < count, t, 0)
    if count <= 0:
        return
    adapter = adapter_at(adapters, row, count, TOP_K)
    source = row
    if GATHER:
        source = row // TOP_K if TOP_K else tl.load(adapters.source + row)
    x_ptr = x + source[None, :] * x_stride
    inner = adapters.inner + (row * PROJECTIONS + projection)[None, :] * RANK
    factor = tl.full((BLOCK_T,), 1.0, tl.float32)
    if input_weights is not None:
        factor = tl.load(input_weights + row)
    r = r_first + tl.arange(0, RANKS)
    current = _next_adapter(adapter, NO_ADAPTER)
    while current < NO_MORE:
        rank, a_first, _ = _matrix_at(adapters, current, projection, PROJECTIONS)
        if r_first < rank:
            selected = adapter == current
            a_ptr = adapters.a + a_first + (expert * rank + r)[:, None] * k_in
            acc = _sum_over_columns(a_ptr, x_ptr, r < rank, selected, k_in, BLOCK_K, DEPTH, ASM)
            acc *= tl.load(scale + (current * PROJECTIONS + projection).to(tl.int64) * adapters.experts + expert)
            acc *= factor[None, :]
            tl.store(inner + r[:, None], acc, mask=selected[None, :] & (r < rank)[:, None])
        current = _next_adapter(adapter, current)
