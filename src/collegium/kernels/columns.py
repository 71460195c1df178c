"""Columns of each row in the order of its expert's weights, and sums of columns."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tiles import token_at

__all__ = ["columns_kernel", "sums_kernel"]


@triton.jit(do_not_specialize_on_alignment=["source", "owner"])
def columns_kernel(
    x, order, source, owner, out, columns, x_stride, experts,
    GATHER: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out [R, columns]``: row r is its token's numbers at ``order [E, columns]`` int32 of its expert.

    owner: first rows of experts ``[E+1]``, or with TOP_K the ids of unsorted rows. Rows of no expert are not written.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if TOP_K:
        expert = tl.load(owner + row).to(tl.int64)
    else:
        each = tl.arange(0, BLOCK_E)
        stop = tl.load(owner + 1 + each, mask=each < experts, other=row + 1)
        expert = tl.sum((stop <= row).to(tl.int64))
    if (expert < 0) | (expert >= experts):
        return
    token = token_at(row, source, GATHER, TOP_K)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = tl.load(order + expert * columns + column, mask=inside, other=0)
    tl.store(out + row * columns + column, tl.load(x + token * x_stride + at, mask=inside), mask=inside)


@triton.jit
def sums_kernel(
    x, used, out, columns, x_stride, groups, row_step, group_step,
    SOME: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out`` float32, row_step from row to row: the sums of 32 columns each, zero beyond ``columns``.

    used: how many rows there are if SOME.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    kept = row < tl.load(used) if SOME else True
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + row * x_stride + column, mask=(column < columns) & kept, other=0.0).to(tl.float32)
    tl.store(out + row * row_step + group * group_step, tl.sum(value, 1), mask=(group < groups) & kept)
