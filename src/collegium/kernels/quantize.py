"""Rows to codes and scales in one pass, bit for bit as ``ops/quantize.py`` defines them.

Rows may be read through an index and multiplied by a weight each, so gathering, weighting and quantising are one
pass over memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .scales import INFINITY, scaled
from .tiles import pdl_wait

__all__ = ["cast_kernel", "e4m3_kernel", "load_rows", "nvfp4_kernel", "store_codes"]


@triton.jit
def load_rows(
    x, source, weights, row, column, rows, columns, x_stride, GATHER: tl.constexpr, WEIGHTS: tl.constexpr
):  # fmt: skip
    """Return rows as float32 ``[rows, columns]``, weighted and rounded to their dtype, 0 outside."""
    live = row < rows
    at = row
    if GATHER:
        at = tl.load(source + row, mask=live, other=0)
    inside = live[:, None] & (column < columns)[None, :]
    stored = tl.load(x + at[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    if WEIGHTS:
        weight = tl.load(weights + row, mask=live, other=0.0)
        stored = (stored.to(tl.float32) * weight[:, None]).to(stored.dtype)
    return stored.to(tl.float32)


@triton.jit
def _places(row, column, columns, across):
    if across is None:
        return row[:, None] * columns + column[None, :]
    else:
        return row[:, None] + column[None, :] * across


@triton.jit
def _to_e4m3(value, dtype: tl.constexpr, ROUND: tl.constexpr):
    """Convert values of at most 448, to nearest even. ROUND: rounded here, which the interpreter gets wrong."""
    if ROUND:
        bits = value.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # To three bits of mantissa, and below 2^-6 to a multiple of 2^-9, by adding and taking away 1.5 * 2^14.
        normal = (size + 0x7FFFF + ((size >> 20) & 1)) & -0x100000
        small = ((tl.abs(value) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)
        rounded = tl.where(size < 0x3C800000, small, normal) | (bits & -0x80000000)
        value = rounded.to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["used"])
def cast_kernel(
    x, source, weights, used, codes, rows, columns, x_stride, across,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GATHER: tl.constexpr, WEIGHTS: tl.constexpr, SOME: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write rows in the dtype of codes ``[rows, columns]``, with across ``[columns, across]``.

    SOME: only the first ``used [1]`` ones.
    """
    pdl_wait(PDL)
    if SOME:
        rows = tl.minimum(tl.load(used), rows)
        if tl.program_id(0) * BLOCK_R >= rows:
            return
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    value = load_rows(x, source, weights, row, column, rows, columns, x_stride, GATHER, WEIGHTS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = codes + _places(row, column, columns, across)
    tl.store(at, value.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def store_codes(
    value, codes, scales, row, column, rows, groups, padded_cols, part,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, POWER: tl.constexpr, BYTE: tl.constexpr,
    ROUND: tl.constexpr, REORDER: tl.constexpr, fixed=None, across=None,
):  # fmt: skip
    """Write the codes and scales of ``value [BLOCK_R, BLOCK_C]`` float32, block ``part`` of the columns of its rows.

    fixed: the scale of all of them, None for one that is found here. across: elements from the scales of a group of
    columns to those of the next, None where those of a row are next to each other.
    """
    value = tl.reshape(value, [BLOCK_R, BLOCK_C // GROUP, GROUP])
    within, scale, finite = scaled(value, fixed, POWER)
    inside = (row < rows)[:, None] & (column < padded_cols)[None, :]
    quantized = _to_e4m3(tl.reshape(within, [BLOCK_R, BLOCK_C]), codes.dtype.element_ty, ROUND)
    place = column
    if REORDER:
        # t (32), s (8), half (4), i (1) to half (64), s (16), t (4), i (1).
        place = column // 128 * 128 + column // 4 % 2 * 64 + column // 8 % 4 * 16 + column // 32 % 4 * 4 + column % 4
    tl.store(codes + row[:, None] * padded_cols + place[None, :], quantized, mask=inside)
    group = part * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
    in_bounds = (row < rows)[:, None] & (group < groups)[None, :]
    byte = tl.where(finite, scale.to(tl.int32, bitcast=True) >> 23, 255).to(tl.uint8)
    stored = byte if BYTE else tl.where(finite, scale, float("nan"))
    tl.store(scales + _places(row, group, groups, across), stored, mask=in_bounds)


@triton.jit(do_not_specialize=["rows", "late"], do_not_specialize_on_alignment=["used"])
def e4m3_kernel(
    x, source, weights, used, codes, scales, rows, columns, x_stride, groups, padded_cols, late, fixed, across,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, POWER: tl.constexpr, BYTE: tl.constexpr,
    GATHER: tl.constexpr, WEIGHTS: tl.constexpr, SOME: tl.constexpr, ROUND: tl.constexpr, REORDER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write codes ``[rows, wide]``, zeros beyond ``columns``, and scales ``[rows, groups]``; BLOCK_C is whole groups.

    A group with NaN or infinity gets zero codes and a NaN scale. fixed, across: as ``store_codes`` says. POWER: the
    scale is the least power of two that saturates nothing; BYTE: stored as its E8M0 byte. REORDER: codes change places
    within 128 columns (``ordered`` in ``ops/quantize.py``). SOME: only the first ``used [1]`` rows, and never late.
    late: 1 where nothing is read that the kernel before writes; then it is waited for at the end.
    """
    if PDL:
        if late == 0:
            gdc_wait()
        gdc_launch_dependents()
    if SOME:
        rows = tl.minimum(tl.load(used), rows)
        if tl.program_id(0) * BLOCK_R >= rows:
            return
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    value = load_rows(x, source, weights, row, column, rows, columns, x_stride, GATHER, WEIGHTS)
    store_codes(
        value, codes, scales, row, column, rows, groups, padded_cols, tl.program_id(1),
        GROUP, BLOCK_R, BLOCK_C, POWER, BYTE, ROUND, REORDER, fixed, across,
    )  # fmt: skip
    if PDL:
        # The next kernel waits for this one only, and needs what both wrote.
        gdc_wait()


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["used"])
def nvfp4_kernel(
    x, source, weights, used, codes, scales, global_scales, rows, columns, x_stride, groups, fixed,
    BLOCK_C: tl.constexpr, GATHER: tl.constexpr, WEIGHTS: tl.constexpr, SOME: tl.constexpr, ROUND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write E2M1 codes two a byte, E4M3 scales of 16 columns and float32 scales of a row; a program owns a row.

    SOME: only the first ``used [1]`` rows. fixed: the scale of all rows, None for one that is found here.
    """
    pdl_wait(PDL)
    if SOME:
        rows = tl.minimum(tl.load(used), rows)
        if tl.program_id(0) >= rows:
            return
    index = tl.program_id(0).to(tl.int64)
    row = index + tl.arange(0, 1)
    column = tl.arange(0, BLOCK_C)
    value = load_rows(x, source, weights, row, column, rows, columns, x_stride, GATHER, WEIGHTS)
    value = tl.reshape(value, [BLOCK_C // 16, 16])
    group_max = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    row_max = tl.max(group_max, 0)
    finite = row_max < INFINITY
    amax = tl.where(finite, group_max, 0).to(tl.float32, bitcast=True)
    row_amax = tl.where(finite, row_max, 0).to(tl.float32, bitcast=True)
    # 2688 is 6 * 448; the floor times the smallest E4M3 number is the smallest normal float32.
    global_scale = tl.maximum(tl.div_rn(row_amax, 2688.0), 6.018531076210112e-36)
    if fixed is not None:
        global_scale = tl.where(finite, fixed, global_scale)
    scale = tl.div_rn(amax, tl.full([BLOCK_C // 16], 6.0, tl.float32) * global_scale)
    scale = _to_e4m3(tl.minimum(tl.maximum(scale, 0.001953125), 448.0), scales.dtype.element_ty, ROUND)
    factor = tl.div_rn(1.0, scale.to(tl.float32) * global_scale)
    scaled = tl.where(finite, value * factor[:, None], 0.0)
    size = tl.abs(scaled)
    # Middles between 0, 0.5, 1, 1.5, 2, 3, 4 and 6; one that belongs to an even code above it counts as above.
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    code |= (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(code, [BLOCK_C // 2, 2]))
    pair = tl.arange(0, BLOCK_C // 2)
    width = (columns + 1) // 2
    tl.store(codes + index * width + pair, (low | (high << 4)).to(tl.uint8), mask=pair < width)
    group = tl.arange(0, BLOCK_C // 16)
    tl.store(scales + index * groups + group, scale, mask=group < groups)
    tl.store(global_scales + index, tl.where(finite, global_scale, float("nan")))
