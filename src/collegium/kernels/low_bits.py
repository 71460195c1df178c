"""Codes of two and three bits to bfloat16 operands, in registers: blocks of GGUF of 256 columns.

A K block is one block. Each 16 of its columns, a run, have a multiplier and an offset: an operand is code * multiplier
+ offset, and the product of a K block is multiplied by the block's number. In a fragment of the tensor core, lane t of
four holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16 (a step), for one row in two registers. So that a lane needs few
multipliers, the columns of a run are spread over the four steps of a group, in one lane: position ``16 * step + 8 *
high + 2 * t + low`` of a K block is column ``64 * group + 16 * t + 4 * place + 2 * high + low``, with group ``step %
4`` and place ``2 * half + step % 8 // 4``. Codes are packed in this order, and tokens are read in it. Lane t of a row
has one word of steps, a byte for each group.

A half of a K block has eight steps; ``decode_half`` returns it as two operands of four steps, which take fewer
registers than one. Lanes of 16 bits hold eight codes of two bits, one of each step of a half. Three lanes hold 16
codes of three bits (``low_bits_ptx.py``).

The device runs the PTX of ``low_bits_ptx.py``; the interpreter runs the plain code in the same function. ASM: run PTX.
Shapes: N rows.
"""

import triton
import triton.language as tl

from . import enums
from .low_bits_ptx import (
    MINIMUM_STEPS_TO_FACTORS,
    SHIFTED_STEPS_TO_FACTORS,
    SIGNED_STEPS_TO_FACTORS,
    THREE_BITS_FIRST,
    THREE_BITS_SECOND,
    TWO_BITS,
)

__all__ = [
    "block_factor",
    "decode_half",
    "has_low_bits",
    "load_factors",
    "position_columns",
    "word_of_number",
    "words_of_rows",
]

TWO_BIT_LANES = tl.constexpr(enums.TWO_BIT_LANES)
TERNARY_SCALE = tl.constexpr(enums.TERNARY_SCALE)
MINIMUM_STEPS = tl.constexpr(enums.MINIMUM_STEPS)
SHIFTED_STEPS = tl.constexpr(enums.SHIFTED_STEPS)

_UNIT = tl.constexpr(2.0**-44)  # of operands: ratios of a minimum to a scale, up to 2^40, stay within bfloat16


@triton.constexpr_function
def has_low_bits(WEIGHT):
    """Return whether codes have two or three bits."""
    return WEIGHT in (enums.TWO_BIT_LANES, enums.THREE_BIT_LANES)


@triton.constexpr_function
def _constant_word(VALUE):
    """Return both halves of a word with a bfloat16 power of two or its negative."""
    import struct

    bits = struct.unpack("<i", struct.pack("<f", VALUE))[0] >> 16
    return bits << 16 | bits & 0xFFFF


@triton.jit
def position_columns(COLUMNS: tl.constexpr):
    """Return the columns of the first operand of a K block by position, ``[COLUMNS]``; those of the next are 4 more."""
    position = tl.arange(0, COLUMNS)
    step = position // 16
    within = position % 16
    lane = within % 8 // 2
    columns = step % 4 * 64 + lane * 16 + step // 4 * 4 + within // 8 * 2 + position % 2
    # Pairs are loaded at a time, which the compiler does not find out.
    return tl.max_contiguous(tl.multiple_of(columns, 2), 2)


@triton.jit
def words_of_rows(rows, SCALE: tl.constexpr):
    """Return the words of scales of ``rows`` rows and a K block.

    Four words of steps of each row, unless there are none, then the numbers of blocks: with a ratio a word of each row,
    otherwise two rows in a word, in multiples of four words.
    """
    numbers = rows if SCALE == MINIMUM_STEPS else (rows + 7) // 8 * 4
    return numbers if SCALE == TERNARY_SCALE else 4 * rows + numbers


@triton.jit
def word_of_number(row, rows, SCALE: tl.constexpr):
    """Return where the numbers of rows ``row`` are among the ``words_of_rows``."""
    number = row if SCALE == MINIMUM_STEPS else row // 2
    return number if SCALE == TERNARY_SCALE else 4 * rows + number


@triton.jit
def block_factor(words, SCALE: tl.constexpr):
    """Return the factor of a K block's product, float32 ``[N, 1]``, from the words of its numbers.

    A tile starts at an even row, and rows alternate between gate and up by eights.
    """
    if SCALE != MINIMUM_STEPS:
        words = words >> tl.arange(0, words.shape[0]) % 2 * 16
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None] / _UNIT


@triton.jit
def _spread(factor):
    """Return ``[N, 4]``, a number of each lane t of a step, as ``[N, 16]``."""
    # By views alone, as ``join_quarters``.
    rows: tl.constexpr = factor.shape[0]
    return tl.reshape(tl.broadcast_to(tl.reshape(factor, (rows, 1, 4, 1)), (rows, 2, 4, 2)), (rows, 16))


@triton.jit
def load_factors(words, steps, SCALE: tl.constexpr, ASM: tl.constexpr):
    """Return multipliers and offsets of both halves of a K block: four of each, one a group, for ``decode_half``.

    words: ``[N]``, with the numbers of blocks. steps: ``[N, 4]``, pointers to words of a byte for each group.
    """
    if SCALE == TERNARY_SCALE:
        return _ternary_factors(words, ASM)
    elif ASM:
        return _factors_in_ptx(tl.load(steps), words, SCALE)
    else:
        bytes_of_groups = tl.load(steps)
        m0, f0, s0 = _factors(bytes_of_groups & 255, words, SCALE)
        m1, f1, s1 = _factors(bytes_of_groups >> 8 & 255, words, SCALE)
        m2, f2, s2 = _factors(bytes_of_groups >> 16 & 255, words, SCALE)
        m3, f3, s3 = _factors(bytes_of_groups >> 24 & 255, words, SCALE)
        return (m0, m1, m2, m3), (f0, f1, f2, f3), (s0, s1, s2, s3)


@triton.jit
def _ternary_factors(words, ASM: tl.constexpr):
    """Return factors of codes that stand for -1, 0 and 1."""
    rows: tl.constexpr = words.shape[0]
    if ASM:
        m0 = tl.full((rows, 4), _constant_word(2.0**89), tl.int32)
        m1 = tl.full((rows, 4), _constant_word(2.0**87), tl.int32)
        m2 = tl.full((rows, 4), _constant_word(2.0**85), tl.int32)
        m3 = tl.full((rows, 4), _constant_word(2.0**83), tl.int32)
        offset = tl.full((rows, 4), _constant_word(-(2.0**-44)), tl.int32)
    else:
        m0 = tl.full((rows, 4), _UNIT, tl.float32)
        m1, m2, m3, offset = m0, m0, m0, -m0
    offsets = offset, offset, offset, offset
    return (m0, m1, m2, m3), offsets, offsets


@triton.jit
def _factors_in_ptx(steps, words, SCALE: tl.constexpr):
    """Return what the PTX of steps makes of words ``[N, 4]`` of four groups."""
    if SCALE == SHIFTED_STEPS:
        m0, m1, m2, m3, f0, f1, f2, f3, s0, s1, s2, s3 = tl.inline_asm_elementwise(
            SHIFTED_STEPS_TO_FACTORS,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [steps],
            dtype=(tl.int32,) * 12,
            is_pure=True,
            pack=1,
        )
        return (m0, m1, m2, m3), (f0, f1, f2, f3), (s0, s1, s2, s3)
    elif SCALE == MINIMUM_STEPS:
        ratio, _ = tl.broadcast(words[:, None], steps)
        m0, m1, m2, m3, f0, f1, f2, f3 = tl.inline_asm_elementwise(
            MINIMUM_STEPS_TO_FACTORS,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [steps, ratio],
            dtype=(tl.int32,) * 8,
            is_pure=True,
            pack=1,
        )
        return (m0, m1, m2, m3), (f0, f1, f2, f3), (f0, f1, f2, f3)
    else:
        m0, m1, m2, m3, f0, f1, f2, f3 = tl.inline_asm_elementwise(
            SIGNED_STEPS_TO_FACTORS,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [steps],
            dtype=(tl.int32,) * 8,
            is_pure=True,
            pack=1,
        )
        return (m0, m1, m2, m3), (f0, f1, f2, f3), (f0, f1, f2, f3)


@triton.jit
def _factors(steps, words, SCALE: tl.constexpr):
    """Return the multiplier and the offsets of both halves of a group from bytes ``[N, 4]``, float32."""
    if SCALE == SHIFTED_STEPS:
        step = (steps & 15).to(tl.float32) * _UNIT
        return step, step * (-0.875 - 0.25 * (steps >> 4 & 1)), step * (-0.875 - 0.25 * (steps >> 5 & 1))
    elif SCALE == MINIMUM_STEPS:
        ratio = (words & -65536).to(tl.float32, bitcast=True)[:, None]
        # The ratio is of a number in the upper bits of a byte to one in the lowest.
        offset = (steps >> 4).to(tl.float32) * 1.4693679385278594e-39 * ratio
        offset = offset.to(tl.bfloat16).to(tl.float32)
        return (steps & 15).to(tl.float32) * _UNIT, offset, offset
    else:
        step = (steps - 32).to(tl.float32) * _UNIT
        return step, step * -4.0, step * -4.0


@triton.jit
def decode_half(
    lanes,
    lanes1,
    lanes2,
    multipliers,
    offsets,
    WEIGHT: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return two bfloat16 ``[N, 64]``, the operands of a half of a K block of weights.

    lanes: int16 ``[N, 16]``, of two bits one for each half, of three bits three for both. multipliers, offsets: of
    ``load_factors``.
    """
    m0, m1 = _spread(multipliers[0]), _spread(multipliers[1])
    m2, m3 = _spread(multipliers[2]), _spread(multipliers[3])
    f0, f1 = _spread(offsets[0]), _spread(offsets[1])
    f2, f3 = _spread(offsets[2]), _spread(offsets[3])
    factors = m0, m1, m2, m3, f0, f1, f2, f3
    if ASM:
        steps = _decode_in_ptx(lanes, lanes1, lanes2, factors, WEIGHT, HALF)
    elif WEIGHT == TWO_BIT_LANES:
        stored = (lanes1 if HALF else lanes).to(tl.int32)
        steps = ()
        for step in tl.static_range(8):
            steps += (_number(stored >> 2 * step & 3, factors, step),)
    else:
        steps = ()
        for step in tl.static_range(8):
            code = _three_bits(lanes.to(tl.int32), lanes1.to(tl.int32), lanes2.to(tl.int32), HALF, step)
            steps += (_number(code, factors, step),)
    return _join_steps(steps[0], steps[1], steps[2], steps[3]), _join_steps(steps[4], steps[5], steps[6], steps[7])


@triton.jit
def _number(codes, factors, STEP: tl.constexpr):
    return (codes.to(tl.float32) * factors[STEP % 4] + factors[4 + STEP % 4]).to(tl.bfloat16)


@triton.constexpr_function
def _three_bit_place(HALF, STEP):
    """Return the lane and the first bit of the code of a step, -1 for the one at bit 15 of each lane."""
    first = ((0, 0), (0, 6), (0, 3), (0, 9), (0, 12), (1, 0), (1, 3), (1, 9))
    second = ((2, 0), (2, 6), (2, 3), (2, 9), (2, 12), (1, 6), (1, 12), (-1, 0))
    return (second if HALF else first)[STEP]


@triton.jit
def _three_bits(lanes, lanes1, lanes2, HALF: tl.constexpr, STEP: tl.constexpr):
    PLACE: tl.constexpr = _three_bit_place(HALF, STEP)
    if PLACE[0] < 0:
        return (lanes >> 15 & 1) | (lanes1 >> 14 & 2) | (lanes2 >> 13 & 4)
    elif PLACE[0] == 0:
        return lanes >> PLACE[1] & 7
    elif PLACE[0] == 1:
        return lanes1 >> PLACE[1] & 7
    else:
        return lanes2 >> PLACE[1] & 7


@triton.jit
def _decode_in_ptx(lanes, lanes1, lanes2, factors, WEIGHT: tl.constexpr, HALF: tl.constexpr):
    """Return eight bfloat16 ``[N, 16]``, the steps of a half."""
    m0, m1, m2, m3, f0, f1, f2, f3 = factors
    # Triton passes a word to both lanes of a pair as two registers, of which the PTX reads the first.
    if WEIGHT == TWO_BIT_LANES:
        a0, a1, a2, a3, a4, a5, a6, a7 = tl.inline_asm_elementwise(
            TWO_BITS,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [lanes1 if HALF else lanes, m0, m1, m2, m3, f0, f1, f2, f3],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    elif HALF == 0:
        a0, a1, a2, a3, a4, a5, a6, a7 = tl.inline_asm_elementwise(
            THREE_BITS_FIRST,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [lanes, lanes1, m0, m1, m2, m3, f0, f1, f2, f3],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        a0, a1, a2, a3, a4, a5, a6, a7 = tl.inline_asm_elementwise(
            THREE_BITS_SECOND,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [lanes, lanes1, lanes2, m0, m1, m2, m3, f0, f1, f2, f3],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    return a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def _join_steps(a0, a1, a2, a3):
    """Return four ``[N, 16]``, one after the other, as ``[N, 64]``."""
    # By views alone, as ``join_quarters``.
    both = tl.join(tl.join(a0, a2), tl.join(a1, a3))
    return tl.reshape(tl.permute(both, (0, 2, 3, 1)), (a0.shape[0], 64))
