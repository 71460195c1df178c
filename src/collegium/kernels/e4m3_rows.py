"""Rows to E4M3 codes and float32 scales, bit for bit as ``ops/quantize.py`` writes them."""

import triton
import triton.language as tl

__all__ = ["e4m3_rows_kernel", "e4m3_scaled"]


@triton.jit
def e4m3_scaled(value, POWER: tl.constexpr):
    """Return float32 ``value [rows, columns]`` over its scales, within 448, and the float32 scales of the rows."""
    # NaN fails the comparison too.
    finite = tl.min((tl.abs(value) < float("inf")).to(tl.int32), 1) == 1
    amax = tl.where(finite, tl.max(tl.where(finite[:, None], tl.abs(value), 0.0), 1), 0.0)
    if POWER:
        # 448 is 1.75 * 2^8: the exponent drops by 8, and rises by one for a mantissa above 1.75.
        bits = amax.to(tl.int32, bitcast=True)
        byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = (tl.maximum(byte, 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    factor = tl.div_rn(1.0, scale)
    scaled = tl.where(finite[:, None], value * factor[:, None], 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return scaled, tl.where(finite, scale, float("nan"))


@triton.jit
def e4m3_rows_kernel(
    x,
    codes,
    scales,
    rows,
    columns,
    x_stride,
    groups,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    POWER: tl.constexpr,
):
    """Write codes ``[rows, columns]`` and scales ``[rows, groups]``; a program owns BLOCK_R rows of one group.

    GROUP is a power of two of at least the group's columns. A group with NaN or infinity gets zero codes and a NaN
    scale. POWER: the scale is the least power of two that saturates nothing.
    """
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = group * GROUP + tl.arange(0, GROUP)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scaled, scale = e4m3_scaled(value, POWER)
    tl.store(codes + row[:, None] * columns + column[None, :], scaled.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row * groups + group, scale, mask=row < rows)
