"""Low-rank changes of rows that have an adapter (LoRA): ``scale * B @ (A @ x)``, added to a product's float32 sums.

``low_rank_kernel`` computes ``scale * A @ x`` of each row, in token tiles of a product: a program takes 16 ranks of one
projection, and reads A once for each of the adapters that it takes in its tile. It is launched right before the
product, which runs at the same time and waits for it behind the K loop. The product calls ``first_ranks`` before that
loop and ``add_low_rank`` behind it, which multiplies by B before the activation, and leaves rows without an adapter
alone.

Where experts have few rows (CHANGES), ``low_rank_kernel`` multiplies by B as well, the columns of one adapter in each
program, and stores whole changes. The product then adds them (``add_changes``): its programs do not take the adapters
of a tile one after the other. Both ways give the same bits.

Sums over columns and ranks run in one order, so the bits of a row do not depend on the rest of a batch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .tiles import dot, pdl_wait

__all__ = ["adapter_at", "add_changes", "add_low_rank", "first_ranks", "low_rank_kernel"]

NO_ADAPTER = tl.constexpr(-1)
UNKNOWN_ADAPTER = tl.constexpr(-2)
NO_MORE = tl.constexpr(2147483647)
RANKS = tl.constexpr(16)  # multiplied at once
BLOCK_N = tl.constexpr(128)  # columns of changes multiplied at once
SUMS = tl.constexpr(4)  # over columns, at the same time


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
def _load_b(
    adapters,
    adapter,
    expert,
    column,
    n_out,
    start,
    PROJECTION: tl.constexpr,
    PROJ: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return 16 ranks, from ``start`` on, of an adapter's transposed B, ``[N, 16]``, and how many it has, ``[16]``.

    Zeros for ranks that it lacks, for columns past the end, and for NO_MORE as adapter. INTERLEAVED: ``[N, 32]``, the
    ranks of gate and those of up, with zeros for rows of the other projection.
    """
    COUNT: tl.constexpr = 2 * RANKS if INTERLEAVED else RANKS
    k = tl.arange(0, COUNT)
    exists = adapter < NO_MORE
    rank, _, first = _matrix_at(adapters, tl.where(exists, adapter, 0), PROJECTION + k // RANKS, PROJ.count)
    rank = tl.where(exists, rank, 0)
    r = start + k % RANKS
    inside = (column < n_out)[:, None] & (r < rank)[None, :]
    if INTERLEAVED:
        inside &= (tl.arange(0, column.shape[0]) // 8 % 2)[:, None] == (k // RANKS)[None, :]
    pointers = adapters.b + (first + (expert * rank + r) * n_out)[None, :] + column[:, None]
    return tl.load(pointers, mask=inside, other=0.0), rank


@triton.jit
def _add_ranks(acc, b, rank, inner, selected, start, RANK: tl.constexpr, ASM: tl.constexpr):
    """Return ``acc [N, BLOCK_T]`` plus B, of ``_load_b``, times the inner rows that are ``selected``."""
    k = tl.arange(0, b.shape[1])
    r = start + k % RANKS
    pointers = inner + (k // RANKS * RANK + r)[:, None]
    t = tl.load(pointers, mask=selected[None, :] & (r < rank)[:, None], other=0.0)
    return _add_inner(acc, b, t, ASM)


@triton.jit
def _add_inner(acc, b, t, ASM: tl.constexpr):
    """Return ``acc [N, BLOCK_T]`` plus ``b [N, ranks]`` times float32 ``t [ranks, BLOCK_T]``."""
    if b.dtype == tl.bfloat16:
        # Two terms of bfloat16 have 16 bits of the float32 number.
        upper = t.to(tl.bfloat16)
        lower = (t - upper.to(tl.float32)).to(tl.bfloat16)
        return dot(b, lower, dot(b, upper, acc, ASM), ASM)
    else:
        return _exact_dot(b, t, acc)


@triton.jit
def first_ranks(
    adapters,
    adapter,
    expert,
    column,
    n_out,
    PROJECTION: tl.constexpr,
    PROJ: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return what ``add_low_rank`` begins with: the first adapter of a tile, and its first ranks (``_load_b``).

    Arguments as there.
    """
    first = tl.where(expert < adapters.experts, _next_adapter(adapter, NO_ADAPTER), NO_MORE)
    b, rank = _load_b(adapters, first, expert, column, n_out, 0, PROJECTION, PROJ, INTERLEAVED)
    return first, b, rank


@triton.jit
def add_low_rank(
    acc,
    ranks,
    adapters,
    adapter,
    expert,
    row,
    column,
    n_out,
    PROJECTION: tl.constexpr,
    PROJ: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ASM: tl.constexpr,
    LATE: tl.constexpr,
):
    """Return ``acc [N, BLOCK_T]`` float32, plus B times the inner rows where a row has an adapter.

    ranks: of ``first_ranks``. adapters: ``AdapterRows``. adapter, row: ``[BLOCK_T]``, the result of ``adapter_at`` and
    the rows. column: ``[N]`` columns of the product. PROJ: ``Projections``. INTERLEAVED: eight rows of gate and eight
    of up alternate, and PROJECTION is 0. LATE: the previous kernel, which writes the inner rows, is waited for here. An
    unknown adapter makes its row NaN.
    """
    inner = adapters.inner + (row * PROJ.count + PROJECTION)[None, :] * PROJ.adapter_rank
    current, b, rank = ranks
    if LATE:
        gdc_wait()
    while current < NO_MORE:
        # Read while the current adapter is multiplied.
        following = _next_adapter(adapter, current)
        next_b, next_rank = _load_b(adapters, following, expert, column, n_out, 0, PROJECTION, PROJ, INTERLEAVED)
        selected = adapter == current
        change = _add_ranks(tl.zeros_like(acc), b, rank, inner, selected, 0, PROJ.adapter_rank, ASM)
        if PROJ.adapter_rank > RANKS:
            for start in range(RANKS, tl.max(rank, 0), RANKS):
                b, _ = _load_b(adapters, current, expert, column, n_out, start, PROJECTION, PROJ, INTERLEAVED)
                change = _add_ranks(change, b, rank, inner, selected, start, PROJ.adapter_rank, ASM)
        acc = tl.where(selected[None, :], acc + change, acc)
        current, b, rank = following, next_b, next_rank
    return tl.where((adapter == UNKNOWN_ADAPTER)[None, :], float("nan"), acc)


@triton.jit
def add_changes(
    acc,
    adapters,
    adapter,
    expert,
    row,
    column,
    n_out,
    PROJECTION: tl.constexpr,
    PROJ: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LATE: tl.constexpr,
):
    """Return ``acc [N, BLOCK_T]`` float32, plus the stored changes where a row has an adapter.

    adapters: ``AdapterRows`` whose ``inner`` has changes ``[R, P, n_out]``. Other arguments as in ``add_low_rank``.
    """
    if LATE:
        gdc_wait()
    projection = tl.full((acc.shape[0],), PROJECTION, tl.int32)
    if INTERLEAVED:
        projection = tl.arange(0, acc.shape[0]) // 8 % 2
    # The condition is a bound: Triton's interpreter refuses a mask made with a scalar.
    changed = adapter >= tl.where(expert < adapters.experts, 0, NO_MORE)
    pointers = adapters.inner + (row * PROJ.count)[None, :] * n_out + (projection * n_out + column)[:, None]
    change = tl.load(pointers, mask=changed[None, :] & (column < n_out)[:, None], other=0.0)
    acc = tl.where(changed[None, :], acc + change, acc)
    return tl.where((adapter == UNKNOWN_ADAPTER)[None, :], float("nan"), acc)


@triton.jit
def _add_columns(acc, a, x, ASM: tl.constexpr):
    """Return ``acc`` plus ``a`` times ``x``, 16-bit or float32 numbers."""
    return _exact_dot(a, x, acc) if x.dtype == tl.float32 else dot(a, x, acc, ASM)


@triton.jit
def _sum_over_columns(
    a_ptr, x_ptr, r_inside, selected, k_in, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr
):
    """Return ``[RANKS, BLOCK_T]``: rows of A from ``a_ptr [RANKS, 1]`` times rows at ``x_ptr [1, BLOCK_T]``.

    Blocks of columns take turns in four sums: a product need not wait for the one before it.
    """
    sum0 = tl.zeros((RANKS, x_ptr.shape[1]), dtype=tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    for k_first in tl.range(0, k_in, SUMS * BLOCK_K, num_stages=STAGES):
        operands = ()
        for index in tl.static_range(SUMS):
            k = k_first + index * BLOCK_K + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + k[None, :], mask=r_inside[:, None] & (k < k_in)[None, :], other=0.0)
            x = tl.load(x_ptr + k[:, None], mask=(k < k_in)[:, None] & selected[None, :], other=0.0)
            operands += ((a, x),)
        sum0 = _add_columns(sum0, operands[0][0], operands[0][1], ASM)
        sum1 = _add_columns(sum1, operands[1][0], operands[1][1], ASM)
        sum2 = _add_columns(sum2, operands[2][0], operands[2][1], ASM)
        sum3 = _add_columns(sum3, operands[3][0], operands[3][1], ASM)
    return (sum0 + sum1) + (sum2 + sum3)


class _Rows(NamedTuple):
    """Rows of a tile, ``[BLOCK_T]``: numbers, adapters and factors; x: pointers ``[1, BLOCK_T]`` to them."""

    row: Any
    adapter: Any
    factor: Any
    x: Any


@triton.jit
def _rows_at(
    x,
    adapters,
    input_weights,
    first,
    count,
    x_stride,
    BLOCK_T: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Return up to BLOCK_T of ``count`` rows from ``first`` on, as ``_Rows``. Arguments as in ``low_rank_kernel``."""
    t = tl.arange(0, BLOCK_T)
    row = first + tl.where(t < count, t, 0)
    adapter = adapter_at(adapters, row, count, TOP_K)
    source = row
    if GATHER:
        source = row // TOP_K if TOP_K else tl.load(adapters.source + row)
    factor = tl.full((BLOCK_T,), 1.0, tl.float32)
    if input_weights is not None:
        factor = tl.load(input_weights + row)
    return _Rows(row=row, adapter=adapter, factor=factor, x=x + source[None, :] * x_stride)


@triton.jit
def _inner_rows(
    rows,
    adapters,
    scale,
    current,
    expert,
    k_in,
    projection,
    r_first,
    PROJECTIONS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return ``[RANKS, BLOCK_T]``: scale times 16 ranks of A of adapter ``current``, from r_first on, times ``_Rows``.

    Ranks that the adapter lacks, and rows of other adapters, are zeros.
    """
    rank, a_first, _ = _matrix_at(adapters, current, projection, PROJECTIONS)
    r = r_first + tl.arange(0, RANKS)
    weight = tl.load(scale + (current * PROJECTIONS + projection).to(tl.int64) * adapters.experts + expert)
    a_ptr = adapters.a + a_first + (expert * rank + r)[:, None] * k_in
    acc = _sum_over_columns(a_ptr, rows.x, r < rank, rows.adapter == current, k_in, BLOCK_K, STAGES, ASM)
    acc *= weight
    acc *= rows.factor[None, :]
    return acc


@triton.jit
def _write_inner_rows(
    rows,
    adapters,
    scale,
    expert,
    k_in,
    PROJECTIONS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write the inner rows of ``rows`` (``_Rows``), of a program's ranks and adapters.

    Other arguments as in ``low_rank_kernel``. Of the adapters that occur, in order, a program takes every
    ``num_programs(2)``-th.
    """
    r_first = tl.program_id(1) % (RANK // RANKS) * RANKS
    projection = tl.program_id(1) // (RANK // RANKS)
    inner = adapters.inner + (rows.row * PROJECTIONS + projection)[None, :] * RANK
    r = r_first + tl.arange(0, RANKS)
    current = _next_adapter(rows.adapter, NO_ADAPTER)
    to_skip = tl.program_id(2)
    while current < NO_MORE:
        if to_skip == 0:
            to_skip = tl.num_programs(2)
            rank, _, _ = _matrix_at(adapters, current, projection, PROJECTIONS)
            if r_first < rank:
                acc = _inner_rows(
                    rows,
                    adapters,
                    scale,
                    current,
                    expert,
                    k_in,
                    projection,
                    r_first,
                    PROJECTIONS,
                    BLOCK_K,
                    STAGES,
                    ASM,
                )
                tl.store(inner + r[:, None], acc, mask=(rows.adapter == current)[None, :] & (r < rank)[:, None])
        to_skip -= 1
        current = _next_adapter(rows.adapter, current)


@triton.jit
def _write_changes(
    rows,
    adapters,
    scale,
    expert,
    k_in,
    n_out,
    PROJECTIONS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write the changes of ``rows`` (``_Rows``), of a program's columns and adapters.

    Arguments as in ``_write_inner_rows``. Programs along the second dimension take the projections, and blocks of
    columns in turn; each multiplies by A again.
    """
    projection = tl.program_id(1) % PROJECTIONS
    split = tl.program_id(1) // PROJECTIONS
    splits = tl.num_programs(1) // PROJECTIONS
    change_ptr = adapters.inner + (rows.row * PROJECTIONS + projection)[None, :] * n_out
    current = _next_adapter(rows.adapter, NO_ADAPTER)
    to_skip = tl.program_id(2)
    while current < NO_MORE:
        if to_skip == 0:
            to_skip = tl.num_programs(2)
            rank, _, b_first = _matrix_at(adapters, current, projection, PROJECTIONS)
            inner = ()
            for block in tl.static_range(RANK // RANKS):
                inner += (
                    _inner_rows(
                        rows,
                        adapters,
                        scale,
                        current,
                        expert,
                        k_in,
                        projection,
                        block * RANKS,
                        PROJECTIONS,
                        BLOCK_K,
                        STAGES,
                        ASM,
                    ),
                )
            for n_first in tl.range(split * BLOCK_N, n_out, splits * BLOCK_N, num_stages=STAGES):
                column = n_first + tl.arange(0, BLOCK_N)
                change = tl.zeros((BLOCK_N, rows.row.shape[0]), dtype=tl.float32)
                for block in tl.static_range(RANK // RANKS):
                    r = block * RANKS + tl.arange(0, RANKS)
                    b_ptr = adapters.b + (b_first + (expert * rank + r) * n_out)[None, :] + column[:, None]
                    b = tl.load(b_ptr, mask=(column < n_out)[:, None] & (r < rank)[None, :], other=0.0)
                    change = _add_inner(change, b, inner[block], ASM)
                inside = (rows.adapter == current)[None, :] & (column < n_out)[:, None]
                tl.store(change_ptr + column[:, None], change, mask=inside)
        to_skip -= 1
        current = _next_adapter(rows.adapter, current)


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
    n_out,
    PROJECTIONS: tl.constexpr,
    RANK: tl.constexpr,
    CHANGES: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``adapters.inner [R, PROJECTIONS, RANK]``: scale times A times x, for rows that have an adapter.

    CHANGES: instead, ``[R, PROJECTIONS, n_out]``, B times that, for all columns; the grid has projections times parts
    of the columns as its second dimension.

    x: rows of tokens (GATHER) or rows in order, ``[., x_stride]``. adapters: ``AdapterRows``; a: ``[experts, rank,
    k_in]`` of each adapter and projection. scale: float32 ``[adapters, PROJECTIONS, experts]``. input_weights: float32
    ``[R]``, factors of the rows, or None. tile_expert, tile_row, expert_offsets: token tiles of TILE_T rows, or with
    TOP_K the ids. Entries of ranks that an adapter lacks are not written, nor are rows without an adapter. A grid of
    tiles, projections times groups of ranks, and turns of adapters.

    PDL: the next kernel starts when every program has waited for the previous one, and so need not wait for that.
    """
    pdl_wait(PDL)
    tile = tl.program_id(0)
    expert_id = tl.load(tile_expert + tile)
    known = (expert_id >= 0) & (expert_id < adapters.experts)
    expert = tl.where(known, expert_id, -1).to(tl.int64)
    if expert < 0:
        return
    if TOP_K:
        first = tile.to(tl.int64)
        count = 1
    else:
        first = tl.load(tile_row + tile)
        count = tl.minimum(tl.load(expert_offsets + expert + 1) - first, TILE_T).to(tl.int32)
    for start in range(0, count, BLOCK_T):
        rows = _rows_at(x, adapters, input_weights, first + start, count - start, x_stride, BLOCK_T, TOP_K, GATHER)
        if CHANGES:
            _write_changes(rows, adapters, scale, expert, k_in, n_out, PROJECTIONS, RANK, BLOCK_K, STAGES, ASM)
        else:
            _write_inner_rows(rows, adapters, scale, expert, k_in, PROJECTIONS, RANK, BLOCK_K, STAGES, ASM)
