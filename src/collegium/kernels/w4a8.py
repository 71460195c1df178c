"""Grouped matrix product of four-bit weights and E4M3 activations, codes decoded to E4M3 in registers.

Weights are the first operand, tokens the second, as in ``grouped_gemm.py``. A 32-bit word of the packed weights holds
eight codes of one row: the magnitudes of columns c to c+3 of its first and of its second half in eight three-bit
fields, four bits apart, and the eight signs in the bits between. Two byte permutations turn a word into two operand
registers. A group scale that is a power of two, or an E4M3 number, enters by integer addition to the table the
permutations read, so MXFP4 and NVFP4 have no scale in the K loop. ``experts/triton/packing/w4a8.py`` states layout and
number ranges.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from . import enums
from .activation import activate
from .decode import upper_scale, wait_for_products
from .low_rank import adapter_at, add_changes, add_low_rank, first_ranks
from .tiles import dot, split_gate_up, store_rows, tile_prologue, token_at
from .w4a8_ptx import DECODE_E2M1_E4M3, DECODE_E2M1_E8M0, DECODE_INT4

__all__ = ["w4a8_kernel", "w4a8_tile"]

E2M1_E8M0 = tl.constexpr(enums.E2M1_E8M0)
INT4_FLOAT = tl.constexpr(enums.INT4_FLOAT)
E2M1_E4M3 = tl.constexpr(enums.E2M1_E4M3)
E2M1_SCALED = tl.constexpr(enums.E2M1_SCALED)
INT4_PAIRS = tl.constexpr(enums.INT4_PAIRS)

X_BLOCK_SCALE = tl.constexpr(enums.X_BLOCK_SCALE)
X_BLOCK_SCALE_TRANSPOSED = tl.constexpr(enums.X_BLOCK_SCALE_TRANSPOSED)
X_ROW_SCALE = tl.constexpr(enums.X_ROW_SCALE)

NO_ACTIVATION = tl.constexpr(enums.NO_ACTIVATION)


@triton.jit
def _as_e4m3(bits):
    return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _scale_byte(words, index, ASM: tl.constexpr):
    """Return byte ``index`` of each word as int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [words, index + 0x4440], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (words >> (8 * index)) & 255


@triton.jit
def _unpack_words(words):
    """Return magnitudes and signs ``m0, s0, m1, s1`` of both halves, each for the byte of the word of its column.

    For the interpreter; the PTX unpacks four columns at once.
    """
    byte = (tl.arange(0, words.shape[1]) % 4)[None, :]
    m0 = (words >> (4 * byte)) & 7
    m1 = (words >> (16 + 4 * byte)) & 7
    s0 = (words >> (8 * byte + 7)) & 1
    s1 = (words >> (8 * byte + 3)) & 1
    return m0, s0, m1, s1


@triton.jit
def _with_sign(magnitude, sign):
    return _as_e4m3(magnitude | (sign << 7))


@triton.jit
def _e2m1_magnitude(code, scale):
    """Return the E4M3 byte of an E2M1 magnitude times 2^d; scale: 8 d."""
    # Codes 2 to 7 are (code << 2) + scale; 0.5 has the exponent below that of 1 and no mantissa bit.
    return tl.where(code == 0, 0, tl.where(code == 1, scale, (code << 2) + scale))


@triton.jit
def _first_magnitude(code, scale):
    """Return the E4M3 byte of an E2M1 magnitude without its mantissa bit, times an E4M3 scale over two."""
    return tl.where(code == 0, 0, scale + 8 * (code >> 1))


@triton.jit
def _second_magnitude(code, scale):
    """Return the E4M3 byte of what ``_first_magnitude`` leaves out."""
    return tl.where((code & 1) * (code >> 1) == 0, 0, scale + 8 * (code >> 1) - 8)


@triton.jit
def _int4_value(magnitude, sign):
    return (magnitude - 8 * sign).to(tl.float32).to(tl.float8e4nv)


@triton.jit
def _operand(a0, a1, WARPS: tl.constexpr):
    """Return ``[BLOCK_N, BLOCK_K]`` from the first and second halves of words ``[BLOCK_N, BLOCK_K / 2]``.

    Loaded row (m, r, w, g) of sizes (., 2, WARPS, 8) becomes row (m, w, r, g), and byte (t, s, i) of sizes (4, ., 4)
    column (half, s, t, i): no data moves between threads.
    """
    BLOCK_N: tl.constexpr = a0.shape[0]
    HALF: tl.constexpr = a0.shape[1]
    both = tl.join(a0, a1)
    both = tl.reshape(both, (BLOCK_N // (16 * WARPS), 2, WARPS, 8, 4, HALF // 16, 4, 2))
    both = tl.permute(both, (0, 2, 1, 3, 7, 5, 4, 6))
    return tl.reshape(both, (BLOCK_N, 2 * HALF))


@triton.jit
def _decode_int4(words, ASM: tl.constexpr):
    """Return the E4M3 numbers of the first and second halves of words of INT4 codes."""
    if ASM:
        return tl.inline_asm_elementwise(
            DECODE_INT4, "=&r,=&r,r", [words], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
        )
    else:
        m0, s0, m1, s1 = _unpack_words(words)
        return _int4_value(m0, s0), _int4_value(m1, s1)


@triton.jit
def _decode_e2m1_e8m0(words, scale, ASM: tl.constexpr):
    """Return the E4M3 numbers of both halves of words of E2M1 codes, times powers of two.

    scale: bytes 8 d, which multiply by 2^d when they are added to all bytes of the table but the first. The words of a
    group have the same table, so the compiler computes it once.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            DECODE_E2M1_E8M0,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [words, scale * 0x01010100 + 0x0C080000, scale * 0x01010101 + 0x1C181410],
            dtype=(tl.float8e4nv, tl.float8e4nv),
            is_pure=True,
            pack=4,
        )
    else:
        m0, s0, m1, s1 = _unpack_words(words)
        return _with_sign(_e2m1_magnitude(m0, scale), s0), _with_sign(_e2m1_magnitude(m1, scale), s1)


@triton.jit
def _decode_e2m1_e4m3(words, scale, ASM: tl.constexpr):
    """Return two E4M3 terms of both halves of words of E2M1 codes times E4M3 scales: first, first, second, second.

    scale: bytes, E4M3 scales over two. A magnitude with its mantissa bit set, 1.5 * 2^e, is 2^e + 2^(e-1): the table of
    the first term holds scale * 2^e, and the bytes of the other table, subtracted from those, leave scale * 2^(e-1) or
    zero.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            DECODE_E2M1_E4M3,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [
                words,
                scale * 0x01010100 + 0x08080000,
                scale * 0x01010101 + 0x18181010,
                scale * 0x00010100 + 0x08080000,
                scale * 0x00010001 + 0x08180810,
            ],
            dtype=(tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv),
            is_pure=True,
            pack=4,
        )
    else:
        m0, s0, m1, s1 = _unpack_words(words)
        a0 = _with_sign(_first_magnitude(m0, scale), s0)
        a1 = _with_sign(_first_magnitude(m1, scale), s1)
        b0 = _with_sign(_second_magnitude(m0, scale), s0)
        b1 = _with_sign(_second_magnitude(m1, scale), s1)
        return a0, a1, b0, b1


@triton.jit
def _split_quarters(words):
    """Return the words of each quarter, ``[BLOCK_N, BLOCK_K / 8]`` bytes, from ``[BLOCK_N, BLOCK_K / 2]``."""
    split = tl.reshape(words, (words.shape[0], 4, 2, 2, words.shape[1] // 16))
    even, odd = tl.split(tl.permute(split, (0, 1, 4, 2, 3)))
    q0, q2 = tl.split(even)
    q1, q3 = tl.split(odd)
    SHAPE: tl.constexpr = (words.shape[0], words.shape[1] // 4)
    return tl.reshape(q0, SHAPE), tl.reshape(q1, SHAPE), tl.reshape(q2, SHAPE), tl.reshape(q3, SHAPE)


@triton.jit
def _load_words(pointers, ASM: tl.constexpr):
    """Return codes as bytes for the device, which sees four of them as a word; as whole words for the interpreter."""
    if ASM:
        return tl.load(pointers)
    else:
        word = tl.load(pointers).to(tl.int32) & 255
        for byte in tl.static_range(1, 4):
            word |= (tl.load(pointers + byte).to(tl.int32) & 255) << (8 * byte)
        return word


@triton.jit
def _load_tokens(pointers, valid, BLOCK_T: tl.constexpr):
    return tl.load(pointers, mask=valid, other=0.0) if BLOCK_T <= 32 else tl.load(pointers)


@triton.jit
def _load_transposed_scales(pointers, ASM: tl.constexpr):
    """Return the contiguous float32 scales of a tile's rows for one K block, ``[BLOCK_T]``."""
    if ASM:
        # A plain load would be prefetched into shared memory: every thread would copy all that it needs, a number at a
        # time, and read it back. A weak load would be moved to where the number is needed, and waited for; a relaxed
        # one stays before the product and arrives meanwhile. Pure, and with addresses made from a scalar in each step,
        # so that every thread computes its addresses: Triton 3.9 would move the numbers between threads instead.
        return tl.inline_asm_elementwise(
            "ld.relaxed.cta.global.b32 $0, [$1];",
            "=f,l",
            [pointers.to(tl.int64)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.load(pointers)


@triton.jit
def _dot_scaled(pairs, scales, tokens, acc, ASM: tl.constexpr):
    """Add E2M1 pairs ``[BLOCK_N, BLOCK_K / 2]`` with E8M0 scales ``[BLOCK_N, BLOCK_K / 32]`` times E4M3 tokens."""
    if ASM:
        ones = tl.full((tokens.shape[1], scales.shape[1]), 127, tl.uint8)
        return tl.dot_scaled(pairs, scales, "e2m1", tokens, ones, "e4m3", acc)
    else:
        bits = pairs.to(tl.int32)
        codes = tl.reshape(tl.join(bits & 15, (bits >> 4) & 15), (pairs.shape[0], 2 * pairs.shape[1]))
        values = _with_sign(_e2m1_magnitude(codes & 7, 48), codes >> 3).to(tl.float32)
        groups = tl.reshape(values, (scales.shape[0], scales.shape[1], 32))
        groups *= (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, :, None]
        weights = tl.reshape(groups, (pairs.shape[0], 2 * pairs.shape[1]))
        return tl.dot(weights, tokens.to(tl.float32), acc, input_precision="ieee")


@triton.constexpr_function
def _has_quarters(WEIGHT):
    """Return whether each quarter of a K block has a scale that multiplies its product."""
    return WEIGHT in (enums.INT4_PAIRS, enums.INT4_FLOATS)


@triton.constexpr_function
def _scales_operand(WEIGHT):
    """Return whether the scales of groups are part of the decoded operand."""
    return WEIGHT in (enums.E2M1_E8M0, enums.E2M1_E4M3)


@triton.constexpr_function
def _scale_block(WEIGHT):
    """Return the scales of 64 rows and one K block, in words (in bytes for E2M1_SCALED)."""
    words = {enums.INT4_FLOATS: 4, enums.E2M1_E4M3: 2, enums.INT4_PAIRS: 2, enums.E2M1_SCALED: 4}
    return 64 * words.get(WEIGHT, 1)


@triton.constexpr_function
def _has_x_block_scale(X_SCALE):
    """Return whether tokens have a scale for each K block, which multiplies its product."""
    return X_SCALE in (enums.X_BLOCK_SCALE, enums.X_BLOCK_SCALE_TRANSPOSED)


class _Output(NamedTuple):
    """The result, the row map of ``RowOrder.row_map``, and the rows that ``RowOrder.gather`` reads."""

    out: Any
    row_map: Any
    source: Any


class _Block(NamedTuple):
    """One K block of both operands.

    words: codes, bytes ``[BLOCK_N, BLOCK_K / 2]`` (in the interpreter each byte is its whole word). scales: as
    ``_load_scales`` returns them. x: tokens ``[BLOCK_K, BLOCK_T]``, for weights with a scale for each quarter pointers
    to the first quarter of them. x_scale: ``[BLOCK_T]``, a pointer to the first if they are transposed.
    """

    words: Any
    scales: Any
    x: Any
    x_scale: Any


class _Pointers(NamedTuple):
    """What a step of the K loop reads: tokens, weights and the scales of both."""

    x: Any
    x_scale: Any
    weight: Any
    scale: Any


@triton.jit
def _group_of_byte(WEIGHT: tl.constexpr, HALF: tl.constexpr):
    """Return the group of columns of each byte of the words of a K block, ``[1, HALF]``."""
    GROUPS: tl.constexpr = 8 if WEIGHT == E2M1_E4M3 else 4
    return (tl.arange(0, HALF) // (HALF // GROUPS))[None, :]


@triton.jit
def _load_scales(s_ptr, group, WEIGHT: tl.constexpr):
    """Return the scales of the words of a K block; of weights whose scales multiply products, pointers to them."""
    if WEIGHT == E2M1_SCALED:
        return tl.load(s_ptr)
    elif WEIGHT == E2M1_E8M0:
        return tl.load(s_ptr)[:, None]
    elif WEIGHT == E2M1_E4M3:
        return tl.where(group < 4, tl.load(s_ptr)[:, None], tl.load(s_ptr + 64)[:, None])
    else:
        return s_ptr


@triton.jit
def _load_block(
    pointers,
    valid,
    scale_stride,
    AT: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return K block AT from ``pointers`` on, as ``_Block``."""
    WEIGHT: tl.constexpr = FORMAT.weight
    HALF: tl.constexpr = pointers.weight.shape[1]
    words = _load_words(pointers.weight + AT * (64 * HALF), ASM or WEIGHT == E2M1_SCALED)
    x = pointers.x + AT * (2 * HALF)
    if not _has_quarters(WEIGHT):
        x = _load_tokens(pointers.x + AT * (2 * HALF), valid, BLOCK_T)
    scales = _load_scales(pointers.scale + AT * _scale_block(WEIGHT), _group_of_byte(WEIGHT, HALF), WEIGHT)
    x_scale = pointers.x_scale + AT * scale_stride
    if FORMAT.x_scale == X_BLOCK_SCALE:
        x_scale = tl.load(x_scale)
    return _Block(words=words, scales=scales, x=x, x_scale=x_scale)


@triton.jit
def _product_of_quarters(
    block, valid, zeros, FORMAT: tl.constexpr, BLOCK_T: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr
):
    """Return the product of a K block whose quarters have scales: the sum of the scaled products of the quarters."""
    STEP: tl.constexpr = block.x.shape[0]
    quarters = _split_quarters(block.words)
    total = zeros
    for quarter in tl.static_range(4):
        tokens = _load_tokens(block.x + quarter * STEP, valid, BLOCK_T)
        if FORMAT.weight == INT4_PAIRS:
            pair = tl.load(block.scales + quarter // 2 * 64)
            factor = upper_scale(pair if quarter % 2 else pair << 16)
        else:
            factor = tl.load(block.scales + quarter * 64)[:, None]
        a0, a1 = _decode_int4(quarters[quarter], ASM)
        product = dot(_operand(a0, a1, WARPS), tokens, zeros, ASM) * factor
        total = total + product if quarter else product
    return total


@triton.jit
def _product_of_block(
    block,
    valid,
    before,
    FORMAT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WARPS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return ``before`` plus the product of one K block, scaled by the weights' scales."""
    WEIGHT: tl.constexpr = FORMAT.weight
    if _has_quarters(WEIGHT):
        return _product_of_quarters(block, valid, before, FORMAT, BLOCK_T, WARPS, ASM)
    elif WEIGHT == E2M1_SCALED:
        return _dot_scaled(block.words, block.scales, block.x, before, ASM)
    elif WEIGHT == INT4_FLOAT:
        a0, a1 = _decode_int4(block.words, ASM)
        return dot(_operand(a0, a1, WARPS), block.x, before, ASM) * tl.load(block.scales)[:, None]
    else:
        spread, _ = tl.broadcast(block.scales, block.words)
        index, _ = tl.broadcast(_group_of_byte(WEIGHT, block.words.shape[1]) % 4, block.words)
        scale = _scale_byte(spread, index, ASM)
        if WEIGHT == E2M1_E8M0:
            a0, a1 = _decode_e2m1_e8m0(block.words, scale, ASM)
            return dot(_operand(a0, a1, WARPS), block.x, before, ASM)
        else:
            a0, a1, b0, b1 = _decode_e2m1_e4m3(block.words, scale, ASM)
            a = _operand(a0, a1, WARPS)
            b = _operand(b0, b1, WARPS)
            return dot(b, block.x, dot(a, block.x, before, ASM), ASM)


@triton.jit
def _add_block(acc, block, valid, FORMAT: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr):
    """Return ``acc [BLOCK_N, BLOCK_T]`` plus the scaled product of one K block."""
    BLOCK_T: tl.constexpr = acc.shape[1]
    BY_BLOCK: tl.constexpr = _has_x_block_scale(FORMAT.x_scale)
    # A product with a factor is added to the sum; others continue it.
    SEPARATE: tl.constexpr = BY_BLOCK or not (_scales_operand(FORMAT.weight) or FORMAT.weight == E2M1_SCALED)
    x_scale = block.x_scale
    if FORMAT.x_scale == X_BLOCK_SCALE_TRANSPOSED:
        x_scale = _load_transposed_scales(x_scale + tl.arange(0, BLOCK_T), ASM)
    before = tl.zeros_like(acc) if SEPARATE else acc
    product = _product_of_block(block, valid, before, FORMAT, BLOCK_T, WARPS, ASM)
    if BY_BLOCK:
        product *= x_scale[None, :]
    return acc + product if SEPARATE else product


@triton.jit
def _add_blocks(
    acc,
    pointers,
    valid,
    scale_stride,
    FORMAT: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return ``acc`` plus the products of BLOCKS K blocks from ``pointers`` on.

    All are loaded before the first is multiplied: while the tensor core is busy, the compiler decodes the second block
    and adds the scaled product of the first.
    """
    blocks = ()
    for at in tl.static_range(BLOCKS):
        blocks += (_load_block(pointers, valid, scale_stride, at, FORMAT, acc.shape[1], ASM),)
    for at in tl.static_range(BLOCKS):
        # A named tuple that is an element of a tuple has no field names.
        words, scales, x, x_scale = blocks[at]
        block = _Block(words=words, scales=scales, x=x, x_scale=x_scale)
        acc = _add_block(acc, block, valid, FORMAT, WARPS, ASM)
    CONTINUES: tl.constexpr = _scales_operand(FORMAT.weight) and not _has_x_block_scale(FORMAT.x_scale)
    return wait_for_products(acc, ASM) if CONTINUES else acc


@triton.jit
def _token_pointers(tokens, token, row_first, FORMAT: tl.constexpr):
    """Return the pointers of the first K block of tokens, or of its first quarter, and of their scales."""
    k = tl.arange(0, FORMAT.block_k // 4 if _has_quarters(FORMAT.weight) else FORMAT.block_k)
    x_ptr = tokens.x + token[None, :] * tokens.stride + k[:, None]
    if FORMAT.x_scale == X_BLOCK_SCALE_TRANSPOSED:
        return x_ptr, tokens.scale + row_first
    elif FORMAT.x_scale == X_BLOCK_SCALE:
        return x_ptr, tokens.scale + token * FORMAT.k_blocks
    else:
        return x_ptr, tokens.scale + token


@triton.jit
def _weight_pointers(weights, expert, n_first, row_tiles, FORMAT: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr):
    """Return the pointers of the first K block of weights and of their scales."""
    WEIGHT: tl.constexpr = FORMAT.weight
    WARPS: tl.constexpr = TILE.warps
    K_BLOCKS: tl.constexpr = FORMAT.k_blocks
    HALF: tl.constexpr = FORMAT.block_k // 2
    WEIGHT_BLOCK: tl.constexpr = 64 * HALF
    SCALE_BLOCK: tl.constexpr = _scale_block(WEIGHT)
    n = tl.arange(0, TILE.block_n)
    j = tl.arange(0, HALF)
    # The row of the tensor core that a loaded row becomes in _operand; weights are stored in the core's order.
    permuted = n // (16 * WARPS) * (16 * WARPS) + n // 8 % WARPS * 16 + n // (8 * WARPS) % 2 * 8 + n % 8
    core = n if WEIGHT == E2M1_SCALED else permuted
    n_tile = n_first // 64
    first = (expert * row_tiles + n_tile) * K_BLOCKS
    # Rows past the last tile of the matrix read that tile again; their results are not stored.
    last_tile = row_tiles - 1 - n_tile
    core_tile = tl.minimum(core // 64, last_tile) * K_BLOCKS
    byte = j if ASM or WEIGHT == E2M1_SCALED else j // 4 * 4
    w_ptr = (
        weights.packed + first * WEIGHT_BLOCK + ((core_tile * WEIGHT_BLOCK + core % 64 * HALF)[:, None] + byte[None, :])
    )
    s_ptr = weights.scale + first * SCALE_BLOCK
    if WEIGHT == E2M1_SCALED:
        s_ptr += (core_tile * SCALE_BLOCK + core % 64 * 4)[:, None] + tl.arange(0, 4)[None, :]
    elif _scales_operand(WEIGHT):
        s_ptr += core_tile * SCALE_BLOCK + core % 64
    else:
        s_ptr += tl.minimum(n // 64, last_tile) * (K_BLOCKS * SCALE_BLOCK) + n % 64
    return w_ptr, s_ptr


@triton.jit
def _sum_over_k(
    pointers,
    valid,
    scale_stride,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the sum over K, ``TILE.depth`` K blocks in a step of the loop, and those that are left after it."""
    BLOCK_N: tl.constexpr = TILE.block_n
    DEPTH: tl.constexpr = TILE.depth
    x_ptr, xs_ptr, w_ptr, s_ptr = pointers.x, pointers.x_scale, pointers.weight, pointers.scale
    acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for _ in tl.range(0, FORMAT.k_blocks // DEPTH, num_stages=TILE.stages):
        step = _Pointers(x=x_ptr, x_scale=xs_ptr, weight=w_ptr, scale=s_ptr)
        acc = _add_blocks(acc, step, valid, scale_stride, FORMAT, TILE.warps, DEPTH, ASM)
        x_ptr += DEPTH * FORMAT.block_k
        xs_ptr += DEPTH * scale_stride
        w_ptr += DEPTH * (32 * FORMAT.block_k)
        s_ptr += DEPTH * _scale_block(FORMAT.weight)
    REST: tl.constexpr = FORMAT.k_blocks % DEPTH
    if REST:
        step = _Pointers(x=x_ptr, x_scale=xs_ptr, weight=w_ptr, scale=s_ptr)
        acc = _add_blocks(acc, step, valid, scale_stride, FORMAT, TILE.warps, REST, ASM)
    return acc


@triton.jit
def _scale_rows(
    acc,
    tokens,
    weights,
    expert,
    n_first,
    token,
    row_tiles,
    FORMAT: tl.constexpr,
):
    """Return ``acc [BLOCK_N, BLOCK_T]`` times the scales of weight rows and of tokens, where they have them."""
    if _scales_operand(FORMAT.weight):
        n = n_first + tl.arange(0, acc.shape[0])
        last_row = row_tiles * 64 - 1
        acc *= tl.load(weights.row_scale + expert * (row_tiles * 64) + tl.minimum(n, last_row))[:, None]
    if FORMAT.x_scale == X_ROW_SCALE:
        acc *= tl.load(tokens.scale + token)[None, :]
    return acc


@triton.jit
def _load_bias(bias, column, n_out):
    """Return float32 ``[columns, 1]``; columns past the end read the last one."""
    return tl.load(bias + tl.minimum(column, n_out - 1)).to(tl.float32)[:, None]


@triton.jit
def _column_of_row(n_first, BLOCK_N: tl.constexpr, PROJ: tl.constexpr):
    """Return the column of the result of each packed row from ``n_first`` on; gate and up alternate eight by eight."""
    n = tl.arange(0, BLOCK_N)
    if PROJ.count == 2:
        return n_first // 2 + n // 16 * 8 + n % 8
    else:
        return n_first + n


@triton.jit
def _finish_sums(
    acc,
    bias,
    bounds,
    ranks,
    adapters,
    adapter,
    expert,
    row,
    n_first,
    n_out,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    ASM: tl.constexpr,
    LATE: tl.constexpr,
):
    """Return the result ``[columns, BLOCK_T]`` and its columns: sums plus low-rank changes and bias, activated.

    bias: of the expert's first projection. ranks: of ``first_ranks``, with adapters.
    """
    BLOCK_N: tl.constexpr = acc.shape[0]
    if PROJ.stored_changes:
        column = _column_of_row(n_first, BLOCK_N, PROJ)
        acc = add_changes(acc, adapters, adapter, expert, row, column, n_out, 0, PROJ, PROJ.count == 2, LATE)
    elif PROJ.adapter_rank:
        column = _column_of_row(n_first, BLOCK_N, PROJ)
        acc = add_low_rank(
            acc, ranks, adapters, adapter, expert, row, column, n_out, 0, PROJ, PROJ.count == 2, ASM, LATE
        )
    if PROJ.count == 2:
        gate, up = split_gate_up(acc, BLOCK_N, acc.shape[1])
        column = n_first // 2 + tl.arange(0, BLOCK_N // 2)
        if FORMAT.bias:
            gate += _load_bias(bias, column, n_out)
            up += _load_bias(bias + n_out, column, n_out)
        return activate(gate, up, bounds, PROJ), column
    else:
        column = n_first + tl.arange(0, BLOCK_N)
        if FORMAT.bias:
            acc += _load_bias(bias, column, n_out)
        if PROJ.activation != NO_ACTIVATION:
            acc = activate(acc, acc, bounds, PROJ)
        return acc, column


@triton.jit
def w4a8_tile(
    tokens,
    weights,
    bounds,
    adapters,
    adapter,
    expert,
    n_first,
    row,
    token,
    row_first,
    row_count,
    n_out,
    row_tiles,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ASM: tl.constexpr,
    LAUNCH_NEXT: tl.constexpr,
    LATE: tl.constexpr,
    UNSORTED: tl.constexpr,
):
    """Return float32 ``[columns, BLOCK_T]`` and its columns: rows ``token [BLOCK_T]`` times an expert's weights.

    tokens to adapters, FORMAT to TILE: as in ``w4a8_kernel``. adapter: of each row (``adapter_at``); it and ``row`` are
    read where ``PROJ.adapter_rank`` is not 0. n_first: the first of ``TILE.block_n`` rows of the packed
    weights. row_first: the first of the rows, for transposed scales. row_count: how many of the rows exist; the others
    may be any token, and their results are not used. LAUNCH_NEXT: the next kernel may start once the products are
    complete. LATE: the adapters' kernel is waited for after them. UNSORTED: as in ``grouped_tile``.
    """
    valid = (tl.arange(0, BLOCK_T) < row_count)[None, :]
    x_ptr, xs_ptr = _token_pointers(tokens, token, row_first, FORMAT)
    w_ptr, s_ptr = _weight_pointers(weights, expert, n_first, row_tiles, FORMAT, TILE, ASM)
    pointers = _Pointers(x=x_ptr, x_scale=xs_ptr, weight=w_ptr, scale=s_ptr)
    column = _column_of_row(n_first, TILE.block_n, PROJ)
    ranks = row
    if PROJ.adapter_rank and UNSORTED and not PROJ.stored_changes:
        ranks = first_ranks(adapters, adapter, expert, column, n_out, 0, PROJ, PROJ.count == 2)
    acc = _sum_over_k(pointers, valid, tokens.scale_stride, FORMAT, TILE, BLOCK_T, ASM)
    if LAUNCH_NEXT:
        gdc_launch_dependents()
    if PROJ.adapter_rank and not UNSORTED and not PROJ.stored_changes:
        ranks = first_ranks(adapters, adapter, expert, column, n_out, 0, PROJ, PROJ.count == 2)
    acc = _scale_rows(acc, tokens, weights, expert, n_first, token, row_tiles, FORMAT)
    bias = weights.bias + expert * PROJ.count * n_out
    return _finish_sums(
        acc, bias, bounds, ranks, adapters, adapter, expert, row, n_first, n_out, FORMAT, PROJ, ASM, LATE
    )


@triton.jit
def _write_tile(
    tokens,
    weights,
    bounds,
    adapters,
    output,
    rows,
    n_out,
    row_tiles,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply and store up to BLOCK_T rows. output: ``_Output``. rows: ``TileRows``."""
    # Rows past the end are not read: every program would read the same few rows at the same time. A large tile has few
    # of them, which read an existing row again, since a mask costs instructions; their results are not stored.
    t = tl.arange(0, BLOCK_T)
    row = rows.first + tl.where(t < rows.count, t, 0)
    token = token_at(row, output.source, ROWS.gather, ROWS.top_k)
    adapter = row
    if PROJ.adapter_rank:
        adapter = adapter_at(adapters, row, rows.count, ROWS.top_k)
    result, column = w4a8_tile(
        tokens,
        weights,
        bounds,
        adapters,
        adapter,
        rows.expert,
        rows.n_first,
        row,
        token,
        rows.first,
        rows.count,
        n_out,
        row_tiles,
        FORMAT,
        PROJ,
        TILE,
        BLOCK_T,
        ASM,
        PDL and not ROWS.top_k,
        PDL and PROJ.adapter_rank > 0,
        ROWS.top_k > 0,
    )
    store_rows(result, output.out, output.row_map, row, t < rows.count, 0, column, n_out, ROWS.row_map)


@triton.jit(
    do_not_specialize=["token_tiles"],
    do_not_specialize_on_alignment=["row_map", "source", "expert_offsets", "tile_expert", "tile_row"],
)
def w4a8_kernel(
    tokens,
    weights,
    bounds,
    adapters,
    out,
    row_map,
    source,
    expert_offsets,
    tile_expert,
    tile_row,
    n_out,
    row_tiles,
    token_tiles,
    experts,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``out [R, n_out]``: rows of one expert times its weights, then bias and activation.

    tokens: ``Tokens``; x: E4M3 ``[T or R, stride]``, columns in the weight's order (``ops/quantize.py``), read at row
    source[r] (``ROWS.gather``) or r; scale with BLOCK_T more numbers that are never used where it is transposed.
    weights: ``Weights``; packed: bytes ``[E, row_tiles, K blocks, 64, block_k / 2]``, gate and up in turns of eight
    rows; scale: int32 or float32 ``[E, row_tiles, K blocks, words, 64]``, words by the format, or bytes
    ``[E, row_tiles, K blocks, 64, 4]`` (E2M1_SCALED); row_scale: float32 ``[E, row_tiles, 64]``; bias:
    ``[E, P, n_out]``. bounds: ``ActivationBounds``. adapters: ``AdapterRows`` where ``PROJ.adapter_rank`` is not 0,
    otherwise None. Rows from expert_offsets[E] on are not written. row_map: as in ``grouped_gemm_kernel``. FORMAT:
    ``OperandFormat``. PROJ: ``Projections``. TILE: ``Tile``; its depth need not divide the K blocks. ROWS:
    ``RowOrder``.
    """
    rows = tile_prologue(
        row_tiles * 64,
        token_tiles,
        tile_expert,
        tile_row,
        expert_offsets,
        experts,
        TILE.block_n,
        TILE,
        ROWS.top_k,
        EARLY,
        PDL and PROJ.adapter_rank > 0,
        PDL,
    )
    if rows.expert < 0:
        return
    output = _Output(out, row_map, source)
    # A narrow tile with few rows is multiplied as one of half or a quarter of its size.
    HALVINGS: tl.constexpr = 2 if TILE.narrow else 0
    for halving in tl.static_range(HALVINGS + 1):
        if rows.count <= TILE.block_t >> halving and (
            halving == HALVINGS or rows.count > TILE.block_t >> (halving + 1)
        ):
            _write_tile(
                tokens,
                weights,
                bounds,
                adapters,
                output,
                rows,
                n_out,
                row_tiles,
                FORMAT,
                PROJ,
                TILE,
                ROWS,
                TILE.block_t >> halving,
                ASM,
                PDL,
            )
