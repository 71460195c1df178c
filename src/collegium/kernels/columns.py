"""Columns of each row in the order of its expert's weights, and sums of columns."""

import triton
import triton.language as tl

from .scales import INFINITY
from .tiles import pdl_wait

__all__ = ["columns_kernel", "halves_kernel"]


@triton.jit(do_not_specialize_on_alignment=["source", "expert_of"])
def columns_kernel(
    x,
    order,
    source,
    expert_of,
    out,
    columns,
    x_stride,
    experts,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``out [R, columns]``: row r is a row of x at columns ``order[e]``, with e its expert.

    x: ``[T, columns]``; row r reads row ``source[r]``, or r where source is None. order: int32 ``[E, columns]``.
    expert_of: int64 ``[E + 1]``, the first row of each expert. With TOP_K rows are not sorted: expert_of has their
    expert ids ``[T, TOP_K]``, and row r reads row r // TOP_K. Rows of no expert are not written.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if TOP_K:
        expert = tl.load(expert_of + row).to(tl.int64)
    else:
        index = tl.arange(0, BLOCK_E)
        stop = tl.load(expert_of + 1 + index, mask=index < experts, other=row + 1)
        expert = tl.sum((stop <= row).to(tl.int64))
    if (expert < 0) | (expert >= experts):
        return
    x_row = row
    if TOP_K:
        x_row = row // TOP_K
    elif source is not None:
        x_row = tl.load(source + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x_column = tl.load(order + expert * columns + column, mask=inside, other=0)
    tl.store(out + row * columns + column, tl.load(x + x_row * x_stride + x_column, mask=inside), mask=inside)


@triton.jit
def halves_kernel(
    x,
    valid_rows,
    halves,
    scales,
    sums,
    columns,
    x_stride,
    groups,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write rows ``[R, columns]`` in float16, their scales ``[R]`` and sums ``[R, groups, 8]`` (``halves_and_sums``).

    valid_rows: int64 ``[1]``, how many rows are written; None: all. A program computes one row, of at most BLOCK
    columns.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_valid = True if valid_rows is None else row < tl.load(valid_rows)
    column = tl.arange(0, BLOCK)
    # The condition of a row goes into a bound: Triton's interpreter rejects a mask made with a scalar.
    inside = column < tl.where(is_valid, columns, 0)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    max_bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    finite = max_bits < INFINITY
    exponent = tl.maximum((max_bits >> 23) - 9, 1)
    scaled = tl.where(finite, value * ((254 - exponent) << 23).to(tl.float32, bitcast=True), 0.0).to(tl.float16)
    tl.store(halves + row * columns + column, scaled, mask=inside)
    scale = tl.where(finite, (exponent << 23).to(tl.float32, bitcast=True), float("nan"))
    tl.store(scales + row, scale, mask=is_valid)
    total = tl.sum(tl.reshape(scaled.to(tl.float32), [BLOCK // 32, 32]), 1)[:, None]
    rounded = total.to(tl.float16).to(tl.float32)
    position = tl.arange(0, 8)[None, :]
    terms = tl.where(position == 0, rounded, tl.where(position == 1, total - rounded, 0.0))
    group = tl.arange(0, BLOCK // 32)[:, None]
    offset = (row * groups + group) * 8 + position
    tl.store(sums + offset, terms.to(tl.float16), mask=group < tl.where(is_valid, groups, 0))
