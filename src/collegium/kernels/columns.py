"""Columns of each row in the order of its expert's weights, and sums of columns."""

import triton
import triton.language as tl

from .tiles import pdl_wait, token_at

__all__ = ["columns_kernel", "halves_kernel"]

_INFINITY = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize_on_alignment=["source", "owner"])
def columns_kernel(
    x, order, source, owner, out, columns, x_stride, experts,
    GATHER: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out [R, columns]``: row r is its token's numbers at ``order [E, columns]`` int32 of its expert.

    owner: first rows of experts ``[E+1]``, or with TOP_K the ids of unsorted rows. Rows of no expert are not written.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if TOP_K:
        expert = tl.load(owner + row).to(tl.int64)
    else:
        expert_index = tl.arange(0, BLOCK_E)
        stop = tl.load(owner + 1 + expert_index, mask=expert_index < experts, other=row + 1)
        expert = tl.sum((stop <= row).to(tl.int64))
    if (expert < 0) | (expert >= experts):
        return
    token = token_at(row, source, GATHER, TOP_K)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = tl.load(order + expert * columns + column, mask=inside, other=0)
    tl.store(out + row * columns + column, tl.load(x + token * x_stride + at, mask=inside), mask=inside)


@triton.jit
def halves_kernel(
    x, used, halves, scales, sums, columns, x_stride, groups, SOME: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Write rows ``[., columns]`` in float16, their scales ``[.]`` and sums ``[., groups, 8]`` (``halves_and_sums``).

    used: how many rows there are if SOME. A program owns a row, BLOCK columns of it.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    in_use = row < tl.load(used) if SOME else True
    column = tl.arange(0, BLOCK)
    # The condition of a row goes into a bound: Triton's interpreter refuses a mask made with a scalar.
    inside = column < tl.where(in_use, columns, 0)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    max_bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    finite = max_bits < _INFINITY
    byte = tl.maximum((max_bits >> 23) - 9, 1)
    scaled = tl.where(finite, value * ((254 - byte) << 23).to(tl.float32, bitcast=True), 0.0).to(tl.float16)
    tl.store(halves + row * columns + column, scaled, mask=inside)
    tl.store(scales + row, tl.where(finite, (byte << 23).to(tl.float32, bitcast=True), float("nan")), mask=in_use)
    total = tl.sum(tl.reshape(scaled.to(tl.float32), [BLOCK // 32, 32]), 1)[:, None]
    rounded = total.to(tl.float16).to(tl.float32)
    place = tl.arange(0, 8)[None, :]
    parts = tl.where(place == 0, rounded, tl.where(place == 1, total - rounded, 0.0))
    group = tl.arange(0, BLOCK // 32)[:, None]
    tl.store(sums + (row * groups + group) * 8 + place, parts.to(tl.float16), mask=group < tl.where(in_use, groups, 0))
