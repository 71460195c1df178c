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
from .decode import epilogue, upper_scale
from .tiles import dot, split_gate_up, store_rows, tile_prologue, token_at

__all__ = ["w4a8_kernel", "w4a8_tile"]

E2M1_E8M0 = tl.constexpr(enums.E2M1_E8M0)
INT4_FLOAT = tl.constexpr(enums.INT4_FLOAT)
E2M1_E4M3 = tl.constexpr(enums.E2M1_E4M3)
E2M1_SCALED = tl.constexpr(enums.E2M1_SCALED)
INT4_PAIRS = tl.constexpr(enums.INT4_PAIRS)
INT4_FLOATS = tl.constexpr(enums.INT4_FLOATS)

X_BLOCK_SCALE = tl.constexpr(enums.X_BLOCK_SCALE)
X_BLOCK_SCALE_TRANSPOSED = tl.constexpr(enums.X_BLOCK_SCALE_TRANSPOSED)
X_ROW_SCALE = tl.constexpr(enums.X_ROW_SCALE)

NO_ACTIVATION = tl.constexpr(enums.NO_ACTIVATION)

# Without signs, the upper half of the codes of word $W to the lower half of n: permutations read four codes.
_HALVES = "and.b32 m, $W, 0x77777777; shr.u32 n, m, 16; shl.b32 s, $W, 4;"
_SIGNS = "lop3.b32 $0, a, $W, 0x80808080, 0xF8; lop3.b32 $1, b, s, 0x80808080, 0xF8;"


def _text(word: int, *steps: str) -> tl.constexpr:
    return tl.constexpr(("{ .reg .b32 m, n, s, a, b; " + " ".join(steps) + " }").replace("$W", f"${word}"))


# $2: the word; $3 and $7 (of $3 to $6 and $7 to $10, all the same): the table of eight bytes the permutations read.
_E8M0_ASM = _text(2, _HALVES, "prmt.b32 a, $3, $7, m; prmt.b32 b, $3, $7, n;", _SIGNS)

# Two tables: 0 to 7 and -8 to -1; the sign, spread over its byte, chooses.
_TWO = "prmt.b32 a, 0x44403800, 0x4E4C4A48, {0}; prmt.b32 b, 0xCACCCED0, 0xB8C0C4C8, {0};"
_INT4_ASM = _text(
    2,
    _HALVES,
    _TWO.format("m") + "prmt.b32 m, $W, 0, 0xBA98; lop3.b32 $0, m, b, a, 0xCA;",
    _TWO.format("n") + "prmt.b32 s, s, 0, 0xBA98; lop3.b32 $1, s, b, a, 0xCA;",
)

# $0, $1: first operands; $2, $3: second ones; $4: the word; $5 and $9: the first ones' table; $13 and $17: what
# the second ones lack of the first. Additions issue on another pipe than the permutations and logic that limit this
# kernel: so the second operands are differences, and the sign comes with the first.
_E4M3_ASM = _text(
    4,
    _HALVES,
    "prmt.b32 a, $5, $9, m; prmt.b32 b, $5, $9, n;" + _SIGNS,
    "prmt.b32 a, $13, $17, m; prmt.b32 b, $13, $17, n; sub.u32 $2, $0, a; sub.u32 $3, $1, b;",
)


@triton.jit
def _bytes(bits):
    return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _byte_of(scales, which, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [scales, which + 0x4440], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (scales >> (8 * which)) & 255


@triton.jit
def _e2m1_byte(code, d):
    # Codes 2 to 7 are (code << 2) + d; 0.5 has the exponent below that of 1 and no mantissa bit.
    return tl.where(code == 0, 0, tl.where(code == 1, d, (code << 2) + d))


@triton.jit
def _halves(words):
    """Return magnitudes and signs ``m0, s0, m1, s1`` of both halves for the byte of the word a column is in."""
    byte = (tl.arange(0, words.shape[1]) % 4)[None, :]
    m0 = (words >> (4 * byte)) & 7
    m1 = (words >> (16 + 4 * byte)) & 7
    s0 = (words >> (8 * byte + 7)) & 1
    s1 = (words >> (8 * byte + 3)) & 1
    return m0, s0, m1, s1


@triton.jit
def _e2m1_table(words, d):
    m0, s0, m1, s1 = _halves(words)
    return _bytes(_e2m1_byte(m0, d) | (s0 << 7)), _bytes(_e2m1_byte(m1, d) | (s1 << 7))


@triton.jit
def _int4_one(m, s):
    return (m - 8 * s).to(tl.float32).to(tl.float8e4nv)


@triton.jit
def _first(m, d):
    return tl.where(m == 0, 0, d + 8 * (m >> 1))


@triton.jit
def _second(m, d):
    return tl.where((m & 1) * (m >> 1) == 0, 0, d + 8 * (m >> 1) - 8)


@triton.jit
def _operand(a0, a1, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Return ``[BLOCK_N, BLOCK_K]`` from the first and second halves of words ``[BLOCK_N, BLOCK_K / 2]``.

    Loaded row (m, r, w, g) of sizes (., 2, WARPS, 8) becomes row (m, w, r, g), and byte (t, s, i) of sizes (4, ., 4)
    column (half, s, t, i): each thread keeps what it holds, so nothing moves between threads.
    """
    HALF: tl.constexpr = a0.shape[1]
    both = tl.join(a0, a1)
    both = tl.reshape(both, (BLOCK_N // (16 * WARPS), 2, WARPS, 8, 4, HALF // 16, 4, 2))
    both = tl.permute(both, (0, 2, 1, 3, 7, 5, 4, 6))
    return tl.reshape(both, (BLOCK_N, 2 * HALF))


@triton.jit
def _int4(words, ASM: tl.constexpr):
    """Return the E4M3 numbers of the first and second halves of words."""
    if ASM:
        return tl.inline_asm_elementwise(
            _INT4_ASM, "=&r,=&r,r", [words], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
        )
    else:
        m0, s0, m1, s1 = _halves(words)
        return _int4_one(m0, s0), _int4_one(m1, s1)


@triton.jit
def _quarters(words):
    """Return the words of each quarter, ``[BLOCK_N, BLOCK_K / 8]`` bytes, from ``[BLOCK_N, BLOCK_K / 2]``."""
    split = tl.reshape(words, (words.shape[0], 4, 2, 2, words.shape[1] // 16))
    even, odd = tl.split(tl.permute(split, (0, 1, 4, 2, 3)))
    q0, q2 = tl.split(even)
    q1, q3 = tl.split(odd)
    SHAPE: tl.constexpr = (words.shape[0], words.shape[1] // 4)
    return tl.reshape(q0, SHAPE), tl.reshape(q1, SHAPE), tl.reshape(q2, SHAPE), tl.reshape(q3, SHAPE)


@triton.jit
def _decode(
    words, scales, select,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, WEIGHT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return two E4M3 operands ``[BLOCK_N, BLOCK_K]``: the weights, and what they still lack (E2M1_E4M3)."""
    if WEIGHT == INT4_FLOAT:
        a0, a1 = _int4(words, ASM)
    elif WEIGHT == E2M1_E8M0:
        # The scale byte is 8 d: added to all bytes of the table but the first, it multiplies by 2^d. The words of a
        # group share the table, so it is made outside.
        d = _byte_of(scales, select, ASM)
        if ASM:
            a0, a1 = tl.inline_asm_elementwise(
                _E8M0_ASM, "=&r,=&r,r,r,r,r,r,r,r,r,r",
                [words, d * 0x01010100 + 0x0C080000, d * 0x01010101 + 0x1C181410],
                dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            a0, a1 = _e2m1_table(words, d)
    else:
        # The byte is the E4M3 group scale over two. A magnitude with its mantissa bit set, 1.5 * 2^e, is
        # 2^e + 2^(e-1): the first table holds scale * 2^e, and the bytes of the second, taken from those, leave
        # scale * 2^(e-1) or zero. No byte borrows: the first is never the smaller one.
        d = _byte_of(scales, select, ASM)
        if ASM:
            a0, a1, b0, b1 = tl.inline_asm_elementwise(
                _E4M3_ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [words, d * 0x01010100 + 0x08080000, d * 0x01010101 + 0x18181010,
                 d * 0x00010100 + 0x08080000, d * 0x00010001 + 0x08180810],
                dtype=(tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            m0, s0, m1, s1 = _halves(words)
            a0 = _bytes(_first(m0, d) | (s0 << 7))
            a1 = _bytes(_first(m1, d) | (s1 << 7))
            b0 = _bytes(_second(m0, d) | (s0 << 7))
            b1 = _bytes(_second(m1, d) | (s1 << 7))
    a = _operand(a0, a1, BLOCK_N, WARPS)
    if WEIGHT == E2M1_E4M3:
        return a, _operand(b0, b1, BLOCK_N, WARPS)
    else:
        return a, a


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
def _scales_across(pointers, ASM: tl.constexpr):
    """Return the float32 scales of a tile's rows for one K block, laid out beside each other."""
    if ASM:
        # A plain load would be prefetched into shared memory: every thread would copy all that it needs, a number at a
        # time, and read it back. A weak load would be moved to where the number is needed, and waited for; a relaxed
        # one stays before the product and arrives meanwhile. Pure, and with addresses made from a scalar in each step,
        # so that every thread computes its own addresses: Triton 3.9 would move the numbers between threads instead.
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
def _quarter_sum(
    words, x_ptr, valid, g_ptr, none,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the K block's product: of each quarter of weights and tokens, times its scale."""
    STEP: tl.constexpr = x_ptr.shape[0]
    pieces = _quarters(words)
    total = none
    for quarter in tl.static_range(4):
        tokens = _load_tokens(x_ptr + quarter * STEP, valid, BLOCK_T)
        if PAIRS:
            pair = tl.load(g_ptr + quarter // 2 * 64)
            factor = upper_scale(pair if quarter % 2 else pair << 16)
        else:
            factor = tl.load(g_ptr + quarter * 64)[:, None]
        a0, a1 = _int4(pieces[quarter], ASM)
        product = dot(_operand(a0, a1, BLOCK_N, WARPS), tokens, none, ASM) * factor
        total = total + product if quarter else product
    return total


@triton.jit
def _dot_scaled(pairs, scales, tokens, acc, ASM: tl.constexpr):
    """Add E2M1 pairs ``[BLOCK_N, BLOCK_K / 2]`` with E8M0 scales ``[BLOCK_N, BLOCK_K / 32]`` times E4M3 tokens."""
    if ASM:
        ones = tl.full((tokens.shape[1], scales.shape[1]), 127, tl.uint8)
        return tl.dot_scaled(pairs, scales, "e2m1", tokens, ones, "e4m3", acc)
    else:
        bits = pairs.to(tl.int32)
        codes = tl.reshape(tl.join(bits & 15, (bits >> 4) & 15), (pairs.shape[0], 2 * pairs.shape[1]))
        values = _bytes(_e2m1_byte(codes & 7, 48) | ((codes & 8) << 4)).to(tl.float32)
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


class _Pointers(NamedTuple):
    """Where a step of the K loop reads: tokens and their scales, weights and theirs."""

    x: Any
    x_scale: Any
    weight: Any
    scale: Any


@triton.jit
def _load_scales(s_ptr, group, WEIGHT: tl.constexpr):
    """Return the scales of a K block's words; for weights that scale products, their address."""
    if WEIGHT == E2M1_SCALED:
        return tl.load(s_ptr)
    elif WEIGHT == E2M1_E8M0:
        return tl.load(s_ptr)[:, None]
    elif WEIGHT == E2M1_E4M3:
        return tl.where(group < 4, tl.load(s_ptr)[:, None], tl.load(s_ptr + 64)[:, None])
    else:
        return s_ptr


@triton.jit
def _block_product(
    words,
    tokens,
    scales,
    group,
    x_ptr,
    valid,
    before,
    FORMAT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WARPS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return ``before`` plus the product of one K block."""
    WEIGHT: tl.constexpr = FORMAT.weight
    BLOCK_N: tl.constexpr = words.shape[0]
    if _has_quarters(WEIGHT):
        return _quarter_sum(words, x_ptr, valid, scales, before, BLOCK_N, BLOCK_T, WARPS, WEIGHT == INT4_PAIRS, ASM)
    elif WEIGHT == E2M1_SCALED:
        return _dot_scaled(words, scales, tokens, before, ASM)
    elif WEIGHT == INT4_FLOAT:
        a, _ = _decode(words, words, words, BLOCK_N, WARPS, WEIGHT, ASM)
        return dot(a, tokens, before, ASM) * tl.load(scales)[:, None]
    else:
        spread, _ = tl.broadcast(scales, words)
        select, _ = tl.broadcast(group % 4, words)
        a, b = _decode(words, spread, select, BLOCK_N, WARPS, WEIGHT, ASM)
        product = dot(a, tokens, before, ASM)
        if WEIGHT == E2M1_E4M3:
            product = dot(b, tokens, product, ASM)
        return product


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

    All are read before the first is multiplied: the compiler decodes the second one, and adds the first one's scaled
    product, while the tensor core is busy.
    """
    WEIGHT: tl.constexpr = FORMAT.weight
    BLOCK_T: tl.constexpr = acc.shape[1]
    HALF: tl.constexpr = pointers.weight.shape[1]
    SCALED_OPERAND: tl.constexpr = _scales_operand(WEIGHT)
    BY_GROUP: tl.constexpr = FORMAT.x_scale == X_BLOCK_SCALE or FORMAT.x_scale == X_BLOCK_SCALE_TRANSPOSED
    # A product with a factor of its own is added to the sum; others continue it.
    SEPARATE: tl.constexpr = BY_GROUP or not (SCALED_OPERAND or WEIGHT == E2M1_SCALED)
    none = tl.zeros_like(acc)
    group = (tl.arange(0, HALF) // (HALF // (8 if WEIGHT == E2M1_E4M3 else 4)))[None, :]
    blocks = ()
    for at in tl.static_range(BLOCKS):
        words = _load_words(pointers.weight + at * (64 * HALF), ASM or WEIGHT == E2M1_SCALED)
        tokens = words
        if not _has_quarters(WEIGHT):
            tokens = _load_tokens(pointers.x + at * (2 * HALF), valid, BLOCK_T)
        scales = _load_scales(pointers.scale + at * _scale_block(WEIGHT), group, WEIGHT)
        xs = pointers.x_scale + at * scale_stride
        blocks += ((words, tokens, scales, tl.load(xs) if FORMAT.x_scale == X_BLOCK_SCALE else xs),)
    for at in tl.static_range(BLOCKS):
        words, tokens, scales, xs = blocks[at]
        if FORMAT.x_scale == X_BLOCK_SCALE_TRANSPOSED:
            xs = _scales_across(xs + tl.arange(0, BLOCK_T), ASM)
        before = none if SEPARATE else acc
        x_at = pointers.x + at * (2 * HALF)
        product = _block_product(words, tokens, scales, group, x_at, valid, before, FORMAT, BLOCK_T, WARPS, ASM)
        if BY_GROUP:
            product *= xs[None, :]
        acc = acc + product if SEPARATE else product
    return epilogue(acc, ASM) if SCALED_OPERAND and not BY_GROUP else acc


@triton.jit
def _first_pointers(
    tokens,
    weights,
    expert,
    n_first,
    token,
    row_first,
    row_tiles,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the pointers of the first K block."""
    WEIGHT: tl.constexpr = FORMAT.weight
    WARPS: tl.constexpr = TILE.warps
    K_BLOCKS: tl.constexpr = FORMAT.k_blocks
    W_BLOCK: tl.constexpr = 32 * FORMAT.block_k
    S_BLOCK: tl.constexpr = _scale_block(WEIGHT)
    HALF: tl.constexpr = FORMAT.block_k // 2
    n = tl.arange(0, TILE.block_n)
    j = tl.arange(0, HALF)
    k = tl.arange(0, FORMAT.block_k // 4 if _has_quarters(WEIGHT) else FORMAT.block_k)
    x_ptr = tokens.x + token[None, :] * tokens.stride + k[:, None]
    if FORMAT.x_scale == X_BLOCK_SCALE_TRANSPOSED:
        xs_ptr = tokens.scale + row_first
    elif FORMAT.x_scale == X_BLOCK_SCALE:
        xs_ptr = tokens.scale + token * K_BLOCKS
    else:
        xs_ptr = tokens.scale + token

    # The row of the tensor core that a loaded row becomes in _operand; weights are stored in the core's order.
    moved = n // (16 * WARPS) * (16 * WARPS) + n // 8 % WARPS * 16 + n // (8 * WARPS) % 2 * 8 + n % 8
    core = n if WEIGHT == E2M1_SCALED else moved
    n_tile = n_first // 64
    first = (expert * row_tiles + n_tile) * K_BLOCKS
    last_tile = row_tiles - 1 - n_tile
    beyond = tl.minimum(core // 64, last_tile) * K_BLOCKS
    byte = j if ASM or WEIGHT == E2M1_SCALED else j // 4 * 4
    w_ptr = weights.packed + first * W_BLOCK + ((beyond * W_BLOCK + core % 64 * HALF)[:, None] + byte[None, :])
    s_ptr = weights.scale + first * S_BLOCK
    if WEIGHT == E2M1_SCALED:
        s_ptr += (beyond * S_BLOCK + core % 64 * 4)[:, None] + tl.arange(0, 4)[None, :]
    elif _scales_operand(WEIGHT):
        s_ptr += beyond * S_BLOCK + core % 64
    else:
        s_ptr += tl.minimum(n // 64, last_tile) * (K_BLOCKS * S_BLOCK) + n % 64
    return _Pointers(x=x_ptr, x_scale=xs_ptr, weight=w_ptr, scale=s_ptr)


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
def w4a8_tile(
    tokens,
    weights,
    bounds,
    expert,
    n_first,
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
):
    """Return ``[n, BLOCK_T]`` float32 and its ``n`` columns: rows ``token [BLOCK_T]`` times weights of an expert.

    tokens to bounds, FORMAT to TILE: as in ``w4a8_kernel``. n_first: the first of ``TILE.block_n`` rows of the packed
    weights. row_count: of the rows those that exist; the others may be any of tokens, and nothing of them counts.
    row_first: of rows in order. LAUNCH_NEXT: the next kernel may start once the products are done.
    """
    n = tl.arange(0, TILE.block_n)
    valid = (tl.arange(0, BLOCK_T) < row_count)[None, :]
    pointers = _first_pointers(tokens, weights, expert, n_first, token, row_first, row_tiles, FORMAT, TILE, ASM)
    acc = _sum_over_k(pointers, valid, tokens.scale_stride, FORMAT, TILE, BLOCK_T, ASM)
    if LAUNCH_NEXT:
        gdc_launch_dependents()
    if _scales_operand(FORMAT.weight):
        last_row = row_tiles * 64 - 1
        acc *= tl.load(weights.row_scale + expert * (row_tiles * 64) + tl.minimum(n_first + n, last_row))[:, None]
    if FORMAT.x_scale == X_ROW_SCALE:
        acc *= tl.load(tokens.scale + token)[None, :]
    vector = weights.bias + expert * PROJ.count * n_out
    if PROJ.count == 2:
        gate, up = split_gate_up(acc, TILE.block_n, BLOCK_T)
        column = n_first // 2 + tl.arange(0, TILE.block_n // 2)
        last = tl.minimum(column, n_out - 1)
        if FORMAT.bias:
            gate += tl.load(vector + last).to(tl.float32)[:, None]
            up += tl.load(vector + n_out + last).to(tl.float32)[:, None]
        result = activate(gate, up, bounds, PROJ)
    else:
        column = n_first + n
        result = acc
        if FORMAT.bias:
            result += tl.load(vector + tl.minimum(column, n_out - 1)).to(tl.float32)[:, None]
        if PROJ.activation != NO_ACTIVATION:
            result = activate(result, result, bounds, PROJ)
    return result, column


@triton.jit
def _write_tile(
    tokens,
    weights,
    bounds,
    out,
    row_map,
    source,
    expert,
    row_first,
    row_count,
    n_first,
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
    """Multiply and store ``row_count`` rows, up to BLOCK_T, by the weight rows from n_first on."""
    # Rows beyond the end are not read: every program asks for the same few rows at the same time. In a tall tile, which
    # is fuller, they read a neighbour again, since a mask costs instructions; nothing of them is stored.
    t = tl.arange(0, BLOCK_T)
    row = row_first + tl.where(t < row_count, t, 0)
    token = token_at(row, source, ROWS.gather, ROWS.top_k)
    result, column = w4a8_tile(
        tokens,
        weights,
        bounds,
        expert,
        n_first,
        token,
        row_first,
        row_count,
        n_out,
        row_tiles,
        FORMAT,
        PROJ,
        TILE,
        BLOCK_T,
        ASM,
        PDL and not ROWS.top_k,
    )
    store_rows(result, out, row_map, row, t < row_count, 0, column, n_out, ROWS.row_map)


@triton.jit(
    do_not_specialize=["token_tiles"],
    do_not_specialize_on_alignment=["row_map", "source", "expert_offsets", "tile_expert", "tile_row"],
)
def w4a8_kernel(
    tokens,
    weights,
    bounds,
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
    ``[E, P, n_out]``. bounds: ``ActivationBounds``. Rows from expert_offsets[E] on are not written. row_map: as in
    ``grouped_gemm_kernel``. FORMAT: ``OperandFormat``. PROJ: ``Projections``. TILE: ``Tile``; its depth need not divide
    the K blocks. ROWS: ``RowOrder``.
    """
    expert, row_first, row_count, n_first = tile_prologue(
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
        PDL,
    )
    if expert < 0:
        return
    HALVINGS: tl.constexpr = 2 if TILE.narrow else 0
    for halving in tl.static_range(HALVINGS + 1):
        if row_count <= TILE.block_t >> halving and (halving == HALVINGS or row_count > TILE.block_t >> (halving + 1)):
            _write_tile(
                tokens,
                weights,
                bounds,
                out,
                row_map,
                source,
                expert,
                row_first,
                row_count,
                n_first,
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
