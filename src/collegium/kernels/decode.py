"""Weight codes to bfloat16 or float16 operands, in registers.

A 16-bit lane holds four codes of one row (or two of eight bits), one from each quarter (or half) of a block of input
columns. One instruction works on a pair of lanes and yields one operand for each quarter. The device runs the PTX of
``decode_ptx.py``; the plain code in the same function is what the interpreter runs. All results are exact:
``experts/triton/packing/`` states the number ranges.

FP16: operands are float16, otherwise bfloat16. ASM: run PTX. Shapes: N rows, C columns of a quarter.
"""

import triton
import triton.language as tl

from . import enums
from .decode_ptx import (
    E2M1_TO_BF16,
    E2M1_TO_FP16,
    E4M3_TO_BF16,
    E4M3_TO_BF16_UNSCALED,
    E4M3_TO_FP16,
    E4M3_TO_FP16_UNSCALED,
    FOUR_BITS_TIMES_STEP,
    HIGH_BYTES_TIMES_STEP,
    INT4_TO_BF16,
    INT4_TO_FP16,
    INT8_TO_BF16,
    INT8_TO_FP16,
    LOOK_UP,
    LOW_BYTES_TIMES_STEP,
    RESCALE,
)

__all__ = [
    "decode_block",
    "has_minima",
    "has_one_factor",
    "has_running_scale",
    "integer_divisor",
    "join_quarters",
    "load_tables",
    "look_up",
    "rescale_sum",
    "upper_scale",
    "wait_for_products",
]

E4M3_LANES = tl.constexpr(enums.E4M3_LANES)
E2M1_LANES = tl.constexpr(enums.E2M1_LANES)
INT8_LANES = tl.constexpr(enums.INT8_LANES)
TABLE_LANES = tl.constexpr(enums.TABLE_LANES)

BLOCK_SCALE = tl.constexpr(enums.BLOCK_SCALE)
E8M0_SCALE = tl.constexpr(enums.E8M0_SCALE)
E4M3_SCALE = tl.constexpr(enums.E4M3_SCALE)
GROUP_SCALE = tl.constexpr(enums.GROUP_SCALE)
PAIR_SCALE = tl.constexpr(enums.PAIR_SCALE)
ZERO_SCALE = tl.constexpr(enums.ZERO_SCALE)
HALF_SCALE = tl.constexpr(enums.HALF_SCALE)
STEP_SCALE = tl.constexpr(enums.STEP_SCALE)


# What formats imply.


@triton.constexpr_function
def integer_divisor(FP16):
    """Return the divisor of integers in the operands that they are decoded to."""
    return 1.0 if FP16 else 64.0


@triton.constexpr_function
def _is_stepped(SCALE, WORDS):
    """Return whether steps of groups are multiplied into codes, which leaves one factor for a whole K block."""
    return (SCALE, WORDS) == (enums.STEP_SCALE, 3)


@triton.constexpr_function
def has_one_factor(SCALE, WORDS):
    """Return whether the quarters of a K block share one factor, or have their factors in the operand."""
    return WORDS == 1 or _is_stepped(SCALE, WORDS)


@triton.constexpr_function
def has_minima(SCALE, WORDS):
    """Return whether weights have minima, which multiply sums of the tokens' columns; codes have no zero point then."""
    return _is_stepped(SCALE, WORDS) or (SCALE, WORDS) == (enums.HALF_SCALE, 4)


@triton.constexpr_function
def has_running_scale(WEIGHT):
    """Return whether a sum has a running scale, the factor of the columns added last: weights are integers."""
    return WEIGHT in (enums.INT4_LANES, enums.INT8_LANES)


@triton.constexpr_function
def _zero_point(SCALE, WORDS, EIGHT_BITS):
    """Return the zero point of all codes of a format whose scales hold none."""
    if has_minima(SCALE, WORDS):
        return 0
    if not EIGHT_BITS:
        return 8
    # Steps without minima scale codes of six bits.
    return 32 if SCALE == enums.STEP_SCALE else 128


# Bits as 16-bit numbers.


@triton.jit
def _as_number(bits, FP16: tl.constexpr):
    return bits.to(tl.int16).to(tl.float16 if FP16 else tl.bfloat16, bitcast=True)


@triton.jit
def _four_as_numbers(a, b, c, d, FP16: tl.constexpr):
    return _as_number(a, FP16), _as_number(b, FP16), _as_number(c, FP16), _as_number(d, FP16)


@triton.jit
def _times(bits, factor, FP16: tl.constexpr):
    """Return the number of 16 ``bits`` times ``factor``."""
    # The interpreter does not convert subnormal bfloat16 numbers; as the upper half of a float32 they are exact.
    value = _as_number(bits, FP16).to(tl.float32) if FP16 else (bits << 16).to(tl.float32, bitcast=True)
    return (value * factor).to(tl.float16 if FP16 else tl.bfloat16)


# E2M1 and E4M3 codes, times a scale.


@triton.jit
def _e2m1_quarters(lanes, s0, s1, s2, s3, FP16: tl.constexpr, ASM: tl.constexpr):
    """Return four ``[N, C]``: codes of each quarter times 2^-126 (FP16: 2^-14) times the scale of the quarter."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            E2M1_TO_FP16 if FP16 else E2M1_TO_BF16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [lanes, s0, s1, s2, s3],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
        return _four_as_numbers(a, b, c, d, FP16)
    else:
        bits = lanes.to(tl.int32)
        if FP16:
            a = bits & 0x8E00
            b = (bits << 3) & 0x8E00
            c = ((bits << 6) & 0x0E00) | ((bits << 1) & 0x8000)
            d = ((bits << 9) & 0x0E00) | ((bits << 2) & 0x8000)
        else:
            a = bits & 0x81C0
            b = (bits << 3) & 0x81C0
            c = (bits << 6) & 0x81C0
            d = ((bits >> 5) & 0x0100) | ((bits >> 4) & 0x00C0) | ((bits << 1) & 0x8000)
        return _times(a, s0, FP16), _times(b, s1, FP16), _times(c, s2, FP16), _times(d, s3, FP16)


@triton.jit
def _e4m3_halves(lanes, s0, s1, SCALED: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr):
    """Return two ``[N, C]``: codes of low and high bytes; if SCALED times 2^-120 (FP16: 2^-8) and their scale.

    The two NaN codes become 480; checkpoints refuse them.
    """
    if ASM:
        if SCALED:
            low, high = tl.inline_asm_elementwise(
                E4M3_TO_FP16 if FP16 else E4M3_TO_BF16,
                "=&r,=&r,r,r,r",
                [lanes, s0, s1],
                dtype=(tl.int16, tl.int16),
                is_pure=True,
                pack=2,
            )
        else:
            low, high = tl.inline_asm_elementwise(
                E4M3_TO_FP16_UNSCALED if FP16 else E4M3_TO_BF16_UNSCALED,
                "=&r,=&r,r",
                [lanes],
                dtype=(tl.int16, tl.int16),
                is_pure=True,
                pack=2,
            )
        return _as_number(low, FP16), _as_number(high, FP16)
    else:
        bits = lanes.to(tl.int32)
        LEFT: tl.constexpr = 7 if FP16 else 4
        FIELD: tl.constexpr = 0x3F80 if FP16 else 0x07F0
        low = ((bits << LEFT) & FIELD) | ((bits << 8) & 0x8000)
        high = ((bits >> (8 - LEFT)) & FIELD) | (bits & 0x8000)
        return _times(low, s0, FP16), _times(high, s1, FP16)


# Integers, minus a zero point.


@triton.constexpr_function
def _zero_point_bits(ZERO, FP16):
    """Return the bits of -(1024 + ZERO) in float16, or of -ZERO / 64, ZERO 0 or a power of two, in bfloat16."""
    if FP16:
        return 0xE400 | ZERO
    exponent = 120 + ZERO.bit_length() if ZERO else 0
    return 0x8000 | exponent << 7


@triton.jit
def _negative_zero_point(word, lanes, ZERO: tl.constexpr, ZEROED: tl.constexpr, FP16: tl.constexpr):
    """Return the operand that subtracts a zero point in the PTX of integers, in the shape of ``lanes``.

    ZEROED: it is in the low byte of ``word [N]``, otherwise ZERO.
    """
    if not ZEROED:
        # One number, broadcast: the compiler decodes in registers what loads, constants and views alone lead to.
        bits = tl.full((1, 1), _zero_point_bits(ZERO, FP16), tl.int32)
    elif FP16:
        bits = (word & 255)[:, None] | 0xE400
    else:
        bits = ((word & 255)[:, None].to(tl.float32) * -0.015625).to(tl.int32, bitcast=True) >> 16
    spread, _ = tl.broadcast(bits.to(tl.int16), lanes)
    return spread


@triton.jit
def _minus_zero_point(codes, word, ZERO: tl.constexpr, ZEROED: tl.constexpr, FP16: tl.constexpr):
    """Return what the PTX of integers makes of ``codes [N, C]``."""
    zero = (word & 255)[:, None] if ZEROED else ZERO
    return ((codes - zero).to(tl.float32) / integer_divisor(FP16)).to(tl.float16 if FP16 else tl.bfloat16)


@triton.jit
def _int4_quarters(lanes, words, ZERO: tl.constexpr, ZEROED: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr):
    """Return four ``[N, C]``: (code - zero point) / ``integer_divisor`` of quarters q, in bits 4q to 4q + 3.

    words: four int32 ``[N]``, with the zero points of the quarters in the low bytes if ZEROED; otherwise all are ZERO.
    """
    n0, n1, n2, n3 = words
    if ASM:
        z0 = _negative_zero_point(n0, lanes, ZERO, ZEROED, FP16)
        z1 = _negative_zero_point(n1, lanes, ZERO, ZEROED, FP16)
        z2 = _negative_zero_point(n2, lanes, ZERO, ZEROED, FP16)
        z3 = _negative_zero_point(n3, lanes, ZERO, ZEROED, FP16)
        a, b, c, d = tl.inline_asm_elementwise(
            INT4_TO_FP16 if FP16 else INT4_TO_BF16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [lanes, z0, z1, z2, z3],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
        return _four_as_numbers(a, b, c, d, FP16)
    else:
        a = _minus_zero_point(lanes & 15, n0, ZERO, ZEROED, FP16)
        b = _minus_zero_point((lanes >> 4) & 15, n1, ZERO, ZEROED, FP16)
        c = _minus_zero_point((lanes >> 8) & 15, n2, ZERO, ZEROED, FP16)
        d = _minus_zero_point((lanes >> 12) & 15, n3, ZERO, ZEROED, FP16)
        return a, b, c, d


@triton.jit
def _int8_halves(lanes, n0, n1, ZERO: tl.constexpr, ZEROED: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr):
    """Return two ``[N, C]``: (code - zero point) / ``integer_divisor`` of low and high bytes.

    n0, n1: words of both, as in ``_int4_quarters``.
    """
    if ASM:
        z0 = _negative_zero_point(n0, lanes, ZERO, ZEROED, FP16)
        z1 = _negative_zero_point(n1, lanes, ZERO, ZEROED, FP16)
        low, high = tl.inline_asm_elementwise(
            INT8_TO_FP16 if FP16 else INT8_TO_BF16,
            "=&r,=&r,r,r,r",
            [lanes, z0, z1],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
        return _as_number(low, FP16), _as_number(high, FP16)
    else:
        low = _minus_zero_point(lanes & 255, n0, ZERO, ZEROED, FP16)
        high = _minus_zero_point((lanes >> 8) & 255, n1, ZERO, ZEROED, FP16)
        return low, high


# Integers times a step, in float16.


@triton.jit
def _stepped_quarters(lanes, lanes1, steps, EIGHT_BITS: tl.constexpr, ASM: tl.constexpr):
    """Return four float16 ``[N, C]``: codes of up to five bits times a step of up to six bits for each quarter.

    steps: int32 ``[N]``, a byte a quarter. EIGHT_BITS: a code has a byte, quarters 2 and 3 are in ``lanes1``; otherwise
    a code has four bits.
    """
    if ASM:
        spread, _ = tl.broadcast(steps[:, None], lanes)
        if EIGHT_BITS:
            a, b = _times_step_in_ptx(LOW_BYTES_TIMES_STEP, lanes, spread)
            c, d = _times_step_in_ptx(HIGH_BYTES_TIMES_STEP, lanes1, spread)
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                FOUR_BITS_TIMES_STEP,
                "=&r,=&r,=&r,=&r,r,r,r",
                [lanes, spread],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
                is_pure=True,
                pack=2,
            )
        return _four_as_numbers(a, b, c, d, True)
    elif EIGHT_BITS:
        a = _times_step(lanes & 255, steps, 0)
        b = _times_step((lanes >> 8) & 255, steps, 1)
        c = _times_step(lanes1 & 255, steps, 2)
        d = _times_step((lanes1 >> 8) & 255, steps, 3)
        return a, b, c, d
    else:
        a = _times_step(lanes & 15, steps, 0)
        b = _times_step((lanes >> 4) & 15, steps, 1)
        c = _times_step((lanes >> 8) & 15, steps, 2)
        d = _times_step((lanes >> 12) & 15, steps, 3)
        return a, b, c, d


@triton.jit
def _times_step_in_ptx(PTX: tl.constexpr, lanes, steps):
    # Triton passes a word to both lanes of a pair as two registers, of which the PTX reads the first.
    return tl.inline_asm_elementwise(
        PTX, "=&r,=&r,r,r,r", [lanes, steps], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
    )


@triton.jit
def _times_step(codes, steps, QUARTER: tl.constexpr):
    return (codes.to(tl.float32) * _step_scale(steps, QUARTER)).to(tl.float16)


# Codes that index a table.


@triton.jit
def load_tables(first, PROJECTIONS: tl.constexpr, ASM: tl.constexpr):
    """Return the tables ``[PROJECTIONS, 16]`` of an expert in the form that ``look_up`` takes.

    That is their address ``first``, and on the device one word for each lane of the warp, which any lane can read.
    """
    if ASM:
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        # A column, because the compiler decodes in the layout of an operand what loads, constants and views lead to.
        return tl.load(first + (tl.full((1, 1), 0, tl.int32) + (lane & (16 * PROJECTIONS - 1))))
    else:
        return first


@triton.constexpr_function
def _look_up_ptx(QUARTER):
    return LOOK_UP[QUARTER]


@triton.jit
def look_up(
    lanes,
    tables,
    PROJECTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUARTER: tl.constexpr,
    FP16: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the larger and the smaller terms ``[N, C]`` of the numbers that a quarter of four-bit ``lanes`` selects.

    PROJECTION: whose table is read. INTERLEAVED: eight rows read the first and the next eight the second table.
    """
    # 16 in each byte of a lane that reads the second table.
    second_table = tl.full((1, 1), 0x1010 * PROJECTION, tl.int16)
    if INTERLEAVED:
        both = tl.reshape(tl.join(second_table, tl.full((1, 1), 0x1010, tl.int16)), (1, 2, 1))
        second_table = tl.reshape(tl.broadcast_to(both, (lanes.shape[0] // 16, 2, 8)), (lanes.shape[0], 1))
    if ASM:
        PTX: tl.constexpr = _look_up_ptx(QUARTER)
        large, small = tl.inline_asm_elementwise(
            PTX,
            "=&r,=&r,r,r,r,r",
            [lanes, second_table, tables],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
    else:
        entries = tl.load(tables + (((lanes >> (4 * QUARTER)) & 15) | (second_table & 16)))
        large, small = (entries >> 16).to(tl.int16), entries.to(tl.int16)
    return _as_number(large, FP16), _as_number(small, FP16)


# Scales of groups, from 32-bit words [N].


@triton.jit
def _e4m3_scale(byte, FP16: tl.constexpr):
    """Return an E4M3 group scale times 2^117 (FP16: 2^7): with the factor of E2M1 codes, 2^-9 (2^-7) is left."""
    small = (byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return (small * (128.0 if FP16 else 1.661534994731145e35)).to(tl.float16 if FP16 else tl.bfloat16)


@triton.jit
def _byte_scale(words, like, QUARTER: tl.constexpr, SCALE: tl.constexpr, FP16: tl.constexpr):
    """Return the scale of a quarter, from its byte of ``words``, in 16 bits and the shape of ``like``.

    E8M0 bytes are exponents of that dtype, 0 is the scale 0: the packer writes at least 1 for scales in use.
    """
    byte = (words >> (8 * QUARTER)) & 255
    scale = _as_number(byte << (10 if FP16 else 7), FP16) if SCALE == E8M0_SCALE else _e4m3_scale(byte, FP16)
    spread, _ = tl.broadcast(scale[:, None], like)
    return spread


@triton.jit
def upper_scale(words):
    """Return the bfloat16 scale in the upper half of each word as float32 ``[N, 1]``."""
    return (words & -65536).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _group_scale(words, ZEROED: tl.constexpr):
    """Return words that are float32 numbers as ``[N, 1]``, if ZEROED without the zero points in their low bytes."""
    return ((words & -256).to(tl.float32, bitcast=True) if ZEROED else words)[:, None]


@triton.jit
def _half_scale(words):
    """Return the float16 in the lower half of each word as float32 ``[N, 1]``."""
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def _step_scale(words, QUARTER: tl.constexpr):
    """Return the signed byte of a quarter of each word as float32 ``[N, 1]``."""
    return ((words << (24 - 8 * QUARTER)) >> 24).to(tl.float32)[:, None]


@triton.jit
def _minimum(words, QUARTER: tl.constexpr):
    """Return the byte of a quarter of each word, from 0 to 63, as float16 ``[N]``."""
    return ((words >> (8 * QUARTER)) & 255).to(tl.float32).to(tl.float16)


@triton.jit
def _upper_half(words):
    """Return the float16 in the upper half of each word, ``[N]``."""
    return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)


# Operands from quarters.


@triton.jit
def join_quarters(a0, a1, a2, a3):
    """Return the quarters ``[N, C]`` of a K block as ``[N, 4 C]``."""
    # By views alone: then the operand is built in registers, in its layout.
    both = tl.join(tl.join(a0, a2), tl.join(a1, a3))
    return tl.reshape(tl.permute(both, (0, 2, 3, 1)), (a0.shape[0], 4 * a0.shape[1]))


@triton.jit
def _minima(m0, m1, m2, m3):
    """Return float16 ``[N, 32]``, the operand that multiplies sums: each of four ``[N]`` eight times."""
    # By views alone, not from column indices, as ``join_quarters``.
    both = tl.join(tl.join(m0, m2), tl.join(m1, m3))
    rows: tl.constexpr = m0.shape[0]
    return tl.reshape(tl.broadcast_to(tl.reshape(both, (rows, 4, 1)), (rows, 4, 8)), (rows, 32))


@triton.jit
def _load_words(scale, stride, WORDS: tl.constexpr):
    """Return the words of the quarters of a K block, four ``[N]``; quarters share words where there are fewer."""
    n0 = tl.load(scale)
    n1 = tl.load(scale + stride) if WORDS == 4 else n0
    n2 = tl.load(scale + WORDS // 2 * stride) if WORDS > 1 else n0
    n3 = tl.load(scale + 3 * stride) if WORDS == 4 else n2
    return n0, n1, n2, n3


@triton.jit
def _group_factors(words, SCALE: tl.constexpr, WORDS: tl.constexpr):
    """Return the float32 factors ``[N, 1]`` of the quarters of a K block, from four words ``[N]``."""
    n0, n1, n2, n3 = words
    if SCALE == PAIR_SCALE:
        return upper_scale(n0 << 16), upper_scale(n0), upper_scale(n2 << 16), upper_scale(n2)
    elif SCALE == STEP_SCALE:
        f0 = _half_scale(n0) * _step_scale(n2, 0)
        f1 = _half_scale(n0) * _step_scale(n2, 1)
        f2 = _half_scale(n0) * _step_scale(n2, 2)
        f3 = _half_scale(n0) * _step_scale(n2, 3)
        return f0, f1, f2, f3
    elif SCALE == HALF_SCALE and WORDS == 2:
        return _half_scale(n0), _half_scale(n0 >> 16), _half_scale(n2), _half_scale(n2 >> 16)
    elif SCALE == HALF_SCALE:
        return _half_scale(n0), _half_scale(n1), _half_scale(n2), _half_scale(n3)
    else:
        ZEROED: tl.constexpr = SCALE == ZERO_SCALE
        f0 = _group_scale(n0, ZEROED)
        f1 = _group_scale(n1, ZEROED)
        f2 = _group_scale(n2, ZEROED)
        f3 = _group_scale(n3, ZEROED)
        return f0, f1, f2, f3


# A K block.


@triton.jit
def decode_block(
    lanes,
    lanes1,
    scale,
    stride,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    FP16: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return quarters, factors and minima of a K block of weights.

    lanes: int16 ``[N, C]``; lanes1: the second halves of lanes of two codes. scale: ``[N]``, pointers to the first of
    WORDS words of scales, ``stride`` apart.

    Quarters: four ``[N, C]``; integers without their zero point and divided by ``integer_divisor``, floating-point
    codes times the scales of groups. Factors, of integers alone: float32 ``[N, 1]``, four, or one for the K block
    (``has_one_factor``). Minima, if ``has_minima``: float16 ``[N, 32]``, the operand that multiplies sums, and its
    factor. Codes that index a table have factors alone; ``look_up`` returns their quarters. The rest is unspecified,
    and the compiler removes it.
    """
    if (WEIGHT == E2M1_LANES) or (WEIGHT == E4M3_LANES):
        quarters = _decode_floats(lanes, lanes1, scale, WEIGHT, SCALE, FP16, ASM)
        return quarters, quarters, quarters
    elif _is_stepped(SCALE, WORDS):
        return _decode_stepped(lanes, lanes1, scale, stride, WEIGHT == INT8_LANES, ASM)
    else:
        return _decode_integers(lanes, lanes1, scale, stride, WEIGHT == INT8_LANES, SCALE, WORDS, FP16, ASM)


@triton.jit
def _decode_floats(
    lanes, lanes1, scale, WEIGHT: tl.constexpr, SCALE: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr
):
    """Return the quarters of a K block of E2M1 or E4M3 codes, times the scales of groups if they have them."""
    SCALED: tl.constexpr = (SCALE == E8M0_SCALE) or (SCALE == E4M3_SCALE)
    if SCALED:
        words = tl.load(scale)
        s0 = _byte_scale(words, lanes, 0, SCALE, FP16)
        s1 = _byte_scale(words, lanes, 1, SCALE, FP16)
        s2 = _byte_scale(words, lanes, 2, SCALE, FP16)
        s3 = _byte_scale(words, lanes, 3, SCALE, FP16)
    else:
        # What the interpreter multiplies E4M3 codes by: 2^120, or 2^8 in float16.
        s0 = 256.0 if FP16 else 1.329227995784916e36
        s1, s2, s3 = s0, s0, s0
    if WEIGHT == E4M3_LANES:
        a0, a1 = _e4m3_halves(lanes, s0, s1, SCALED, FP16, ASM)
        a2, a3 = _e4m3_halves(lanes1, s2, s3, SCALED, FP16, ASM)
    else:
        a0, a1, a2, a3 = _e2m1_quarters(lanes, s0, s1, s2, s3, FP16, ASM)
    return a0, a1, a2, a3


@triton.jit
def _decode_stepped(lanes, lanes1, scale, stride, EIGHT_BITS: tl.constexpr, ASM: tl.constexpr):
    """Return quarters times their steps, one factor, and minima with their factor (STEP_SCALE with three words)."""
    halves, minima = tl.load(scale), tl.load(scale + 2 * stride)
    quarters = _stepped_quarters(lanes, lanes1, tl.load(scale + stride), EIGHT_BITS, ASM)
    factor, minima_factor = _half_scale(halves), _half_scale(halves >> 16)
    operand = _minima(_minimum(minima, 0), _minimum(minima, 1), _minimum(minima, 2), _minimum(minima, 3))
    return quarters, (factor,), (operand, minima_factor)


@triton.jit
def _decode_integers(
    lanes,
    lanes1,
    scale,
    stride,
    EIGHT_BITS: tl.constexpr,
    SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    FP16: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return quarters minus zero points, factors, and of HALF_SCALE with four words minima with a factor of 1."""
    ZEROED: tl.constexpr = SCALE == ZERO_SCALE
    ZERO: tl.constexpr = _zero_point(SCALE, WORDS, EIGHT_BITS)
    words = _load_words(scale, stride, WORDS)
    n0, n1, n2, n3 = words
    factors = _group_factors(words, SCALE, WORDS)
    minima = n0, n0
    if has_minima(SCALE, WORDS):
        operand = _minima(_upper_half(n0), _upper_half(n1), _upper_half(n2), _upper_half(n3))
        minima = operand, tl.full(factors[0].shape, 1.0, tl.float32)
    if EIGHT_BITS:
        a0, a1 = _int8_halves(lanes, n0, n1, ZERO, ZEROED, FP16, ASM)
        a2, a3 = _int8_halves(lanes1, n2, n3, ZERO, ZEROED, FP16, ASM)
    else:
        a0, a1, a2, a3 = _int4_quarters(lanes, words, ZERO, ZEROED, FP16, ASM)
    return (a0, a1, a2, a3), factors, minima


# Sums.


@triton.jit
def rescale_sum(acc, unit, factor, ASM: tl.constexpr):
    """Return ``acc [N, T]``, a multiple of ``unit [N, 1]``, as a multiple of ``factor [N, 1]``: acc * unit / factor.

    No factor is zero. An empty sum has 0 for its unit.
    """
    if ASM:
        ratio = tl.inline_asm_elementwise(RESCALE, "=f,f,f", [unit, factor], dtype=tl.float32, is_pure=True, pack=1)
    else:
        ratio = unit / factor
    return acc * ratio


@triton.jit
def wait_for_products(acc, ASM: tl.constexpr):
    """Return ``acc`` once its products are complete: until then the registers of their first operand must not change.

    Triton 3.6 lets the last product of a loop's step run on while the next step decodes into the registers it reads.
    """
    if ASM:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc
