"""Packed weights as 16-bit numbers and float32 factors in memory, for the products of a large batch.

The numbers are the operands that ``grouped_gemm.py`` decodes in registers, and the factors what it multiplies their
products by: nothing is rounded, so a row has the same bits whichever kernel decoded its weights.
"""

import triton
import triton.language as tl

from .decode import BLOCK_SCALE, E4M3_LANES, TABLE_LANES, decoded, look_up, words_of

__all__ = ["expand_kernel"]


@triton.jit
def expand_kernel(
    lanes, scale, table, out, factors, n_out, k_in, groups, row_tiles, scale_rows,
    WEIGHT: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr, K_BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write ``out [M, n_out, k_in]``, or for TABLE_LANES 2 * k_in, and ``factors`` as ``prefill.cu`` takes them.

    M: expert and part. lanes: int16 ``[M, K_BLOCKS, n_out, .]``. scale: 32-bit ``[M, K_BLOCKS, WORDS, n_out]``, where
    groups have one, or as ``Rows`` has it of blocks. table: int32 ``[M, 16]`` for TABLE_LANES. groups: how many there
    are in k_in columns. HALF: out is float16. Axis 0: K blocks of tiles of BLOCK_N rows; axis 1: M.
    """
    WIDTH: tl.constexpr = BLOCK_K // 4
    GROUPS: tl.constexpr = WORDS if WEIGHT == TABLE_LANES else 1
    SPAN: tl.constexpr = BLOCK_K // GROUPS
    EIGHT: tl.constexpr = WEIGHT == E4M3_LANES
    matrix = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) // row_tiles
    row = tl.program_id(0) % row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < n_out
    row = tl.minimum(row, n_out - 1)
    j = tl.arange(0, WIDTH)
    at = lanes + ((matrix * K_BLOCKS + block) * n_out + row)[:, None] * (WIDTH * (2 if EIGHT else 1)) + j[None, :]
    w = tl.load(at)
    w1 = tl.load(at + WIDTH) if EIGHT else w
    s = scale + (matrix * K_BLOCKS + block) * (WORDS * n_out) + row
    a, f, _ = decoded(w, w1, s, n_out, WEIGHT, SCALE, WORDS, HALF, ASM)
    f_at = factors + matrix * groups * n_out + row
    if SCALE == BLOCK_SCALE:
        factor = tl.load(scale + (matrix * scale_rows + row // 128) * K_BLOCKS + block)
        tl.store(f_at + block * n_out, factor, mask=inside)
    elif WEIGHT == TABLE_LANES:
        for group in tl.static_range(GROUPS):
            at = GROUPS * block + group
            tl.store((f_at + at * n_out)[:, None], f[group * 4 // GROUPS], mask=(inside & (at < groups))[:, None])
    to = out + (matrix * n_out + row)[:, None] * (k_in * (2 if WEIGHT == TABLE_LANES else 1)) + j[None, :]
    for quarter in tl.static_range(4):
        at = block * BLOCK_K + quarter * WIDTH
        in_bounds = inside[:, None] & (at + j < k_in)[None, :]
        if WEIGHT == TABLE_LANES:
            large, small = look_up(w, words_of(table + matrix * 16, 1, ASM), 0, False, quarter, HALF, ASM)
            tl.store(to + (at + at // SPAN * SPAN), large, mask=in_bounds)
            tl.store(to + (at + at // SPAN * SPAN + SPAN), small, mask=in_bounds)
        else:
            tl.store(to + at, a[quarter], mask=in_bounds)
