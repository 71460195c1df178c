"""Dequantise packed weights to 16-bit numbers and float32 factors in memory, for the products of a large batch.

The numbers are the operands that ``grouped_gemm.py`` decodes in registers, and the factors multiply their products
there: nothing is rounded, so a row has the same bits whichever kernel decoded its weights.
"""

import triton
import triton.language as tl

from .decode import BLOCK_SCALE, E4M3_LANES, TABLE_LANES, decode_block, load_tables, look_up

__all__ = ["dequantize_kernel"]


@triton.jit
def dequantize_kernel(
    codes,
    scale,
    table,
    out,
    factors,
    n_out,
    k_in,
    groups,
    row_tiles,
    scale_rows,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write ``out [M, n_out, k_in]``, for TABLE_LANES ``[M, n_out, 2 * k_in]``, and ``factors [M, groups, n_out]``.

    M matrices: of each expert and projection. codes: int16 ``[M, K_BLOCKS, n_out, .]``. scale: 32-bit
    ``[M, K_BLOCKS, WORDS, n_out]``, or float32 ``[M, scale_rows, K_BLOCKS]`` for BLOCK_SCALE. table: int32 ``[M, 16]``
    for TABLE_LANES. groups: of columns that share a factor. row_tiles: tiles of BLOCK_N rows in n_out. WEIGHT, SCALE:
    numbers of ``enums.py``. HALF: out is float16, not bfloat16. Grid: ``(K_BLOCKS * row_tiles, M)``.
    """
    QUARTER: tl.constexpr = BLOCK_K // 4
    TABLE: tl.constexpr = WEIGHT == TABLE_LANES
    EIGHT_BITS: tl.constexpr = WEIGHT == E4M3_LANES
    GROUPS: tl.constexpr = WORDS if TABLE else 1
    GROUP_SIZE: tl.constexpr = BLOCK_K // GROUPS
    matrix = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) // row_tiles
    position = tl.program_id(0) % row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = position < n_out
    row = tl.minimum(position, n_out - 1)
    j = tl.arange(0, QUARTER)
    codes += ((matrix * K_BLOCKS + block) * n_out + row)[:, None] * (QUARTER * (2 if EIGHT_BITS else 1)) + j[None, :]
    lanes = tl.load(codes)
    more_lanes = tl.load(codes + QUARTER) if EIGHT_BITS else lanes
    words = scale + (matrix * K_BLOCKS + block) * (WORDS * n_out) + row
    quarters, group_factors, _ = decode_block(lanes, more_lanes, words, n_out, WEIGHT, SCALE, WORDS, HALF, ASM)
    factors += matrix * groups * n_out + row
    if SCALE == BLOCK_SCALE:
        factor = tl.load(scale + (matrix * scale_rows + row // 128) * K_BLOCKS + block)
        tl.store(factors + block * n_out, factor, mask=inside)
    elif TABLE:
        for i in tl.static_range(GROUPS):
            group = GROUPS * block + i
            # The condition of a program goes into a bound: Triton's interpreter refuses a mask made with a scalar.
            group_inside = (position < tl.where(group < groups, n_out, 0))[:, None]
            tl.store((factors + group * n_out)[:, None], group_factors[i * 4 // GROUPS], mask=group_inside)
    out += (matrix * n_out + row)[:, None] * (k_in * (2 if TABLE else 1)) + j[None, :]
    for quarter in tl.static_range(4):
        column = block * BLOCK_K + quarter * QUARTER
        quarter_inside = inside[:, None] & (column + j < k_in)[None, :]
        if TABLE:
            large, small = look_up(lanes, load_tables(table + matrix * 16, 1, ASM), 0, False, quarter, HALF, ASM)
            tl.store(out + (column + column // GROUP_SIZE * GROUP_SIZE), large, mask=quarter_inside)
            tl.store(out + (column + column // GROUP_SIZE * GROUP_SIZE + GROUP_SIZE), small, mask=quarter_inside)
        else:
            tl.store(out + column, quarters[quarter], mask=quarter_inside)
