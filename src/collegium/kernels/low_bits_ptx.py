"""The PTX that ``low_bits.py`` runs to turn codes of two and three bits into bfloat16 operands.

Up to eight bits at the bottom of a bfloat16 number are a multiple of 2^-133. A multiplier of 2^89 times a step makes a
code in the lowest bits code * step * 2^-44; for codes further up it is smaller by their position. So a code takes one
``and`` and one ``fma``, which adds the offset of its columns too. Steps reach bfloat16 as the lowest bits of 128.0.

The logic operation 0xEA of ``lop3`` is (first & second) | third.
"""

import struct

import triton.language as tl

__all__ = [
    "MINIMUM_STEPS_TO_FACTORS",
    "SHIFTED_STEPS_TO_FACTORS",
    "SIGNED_STEPS_TO_FACTORS",
    "THREE_BITS_FIRST",
    "THREE_BITS_SECOND",
    "TWO_BITS",
]

# In: $8 lanes; $9, $11, $13, $15 multipliers and $17, $19, $21, $23 offsets of the four groups, each for both lanes in
# the next register too. Out: $0 to $7, bits 0 and 1, 2 and 3, and so on; groups take turns.
TWO_BITS = tl.constexpr("""
{
    .reg .b32 code, high_byte;

    and.b32 code, $8, 0x00030003;
    fma.rn.bf16x2 $0, code, $9, $17;
    and.b32 code, $8, 0x000C000C;
    fma.rn.bf16x2 $1, code, $11, $19;
    and.b32 code, $8, 0x00300030;
    fma.rn.bf16x2 $2, code, $13, $21;
    and.b32 code, $8, 0x00C000C0;
    fma.rn.bf16x2 $3, code, $15, $23;

    shr.u32 high_byte, $8, 8;
    and.b32 code, high_byte, 0x00030003;
    fma.rn.bf16x2 $4, code, $9, $17;
    and.b32 code, high_byte, 0x000C000C;
    fma.rn.bf16x2 $5, code, $11, $19;
    and.b32 code, high_byte, 0x00300030;
    fma.rn.bf16x2 $6, code, $13, $21;
    and.b32 code, high_byte, 0x00C000C0;
    fma.rn.bf16x2 $7, code, $15, $23;
}
""")

# In: $8 first and $9 second lanes; $10, $12, $14, $16 multipliers and $18, $20, $22, $24 offsets, as in TWO_BITS.
# Out: $0 to $7. Groups 0 and 1 take codes at bit 0 of a shifted lane, groups 2 and 3 those at bit 3.
THREE_BITS_FIRST = tl.constexpr("""
{
    .reg .b32 code, first_6, first_12, second_6;
    shr.u32 first_6, $8, 6;
    shr.u32 first_12, $8, 12;
    shr.u32 second_6, $9, 6;

    and.b32 code, $8, 0x00070007;
    fma.rn.bf16x2 $0, code, $10, $18;
    and.b32 code, first_6, 0x00070007;
    fma.rn.bf16x2 $1, code, $12, $20;
    and.b32 code, $8, 0x00380038;
    fma.rn.bf16x2 $2, code, $14, $22;
    and.b32 code, first_6, 0x00380038;
    fma.rn.bf16x2 $3, code, $16, $24;
    and.b32 code, first_12, 0x00070007;
    fma.rn.bf16x2 $4, code, $10, $18;
    and.b32 code, $9, 0x00070007;
    fma.rn.bf16x2 $5, code, $12, $20;
    and.b32 code, $9, 0x00380038;
    fma.rn.bf16x2 $6, code, $14, $22;
    and.b32 code, second_6, 0x00380038;
    fma.rn.bf16x2 $7, code, $16, $24;
}
""")

# In: $8 first, $9 second and $10 third lanes; $11, $13, $15, $17 multipliers and $19, $21, $23, $25 offsets.
# Out: $0 to $7. Each lane has one bit of the last code at bit 15.
THREE_BITS_SECOND = tl.constexpr("""
{
    .reg .b32 code, third_6, third_12, second_6, second_9, bits;
    shr.u32 third_6, $10, 6;
    shr.u32 third_12, $10, 12;
    shr.u32 second_6, $9, 6;
    shr.u32 second_9, $9, 9;

    and.b32 code, $10, 0x00070007;
    fma.rn.bf16x2 $0, code, $11, $19;
    and.b32 code, third_6, 0x00070007;
    fma.rn.bf16x2 $1, code, $13, $21;
    and.b32 code, $10, 0x00380038;
    fma.rn.bf16x2 $2, code, $15, $23;
    and.b32 code, third_6, 0x00380038;
    fma.rn.bf16x2 $3, code, $17, $25;
    and.b32 code, third_12, 0x00070007;
    fma.rn.bf16x2 $4, code, $11, $19;
    and.b32 code, second_6, 0x00070007;
    fma.rn.bf16x2 $5, code, $13, $21;
    and.b32 code, second_9, 0x00380038;
    fma.rn.bf16x2 $6, code, $15, $23;

    // Bits 0, 1 and 2 of the last code, at 3, 4 and 5.
    shr.u32 bits, $8, 12;
    and.b32 code, bits, 0x00080008;
    shr.u32 bits, $9, 11;
    lop3.b32 code, bits, 0x00100010, code, 0xEA;
    shr.u32 bits, $10, 10;
    lop3.b32 code, bits, 0x00200020, code, 0xEA;
    fma.rn.bf16x2 $7, code, $17, $25;
}
""")

# Constants of the steps' PTX as both halves of a word, and the group's registers.
_GROUP_START = """
    // Group {group}.
    mov.b32 scale, {scale};          // 2^{exponent}
    mov.b32 minus, {minus};
    prmt.b32 both, ${word}, 0, 0x4{group}4{group};"""
_REGISTERS = """
    .reg .b32 both, number, bits, scale, minus, ratio, factor, base, minus_zero;
    mov.b32 base, 0x43004300;        // 128
    mov.b32 minus_zero, 0x80008000;
"""


def _word(value: float) -> str:
    """Return both halves of a word with ``value``, which bfloat16 holds exactly, in PTX."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    assert bits & 0xFFFF == 0, value
    return f"0x{bits >> 16:04X}{bits >> 16:04X}"


def _steps(lines: str, outputs: int, positions: tuple[int, ...], *, zero: float = 0.0, before: str = "") -> str:
    """Return PTX that computes factors of four groups from the bytes of a word.

    lines: of a group, with OUT0, OUT1 and so on for its ``outputs`` registers. positions: the lowest bit of the groups'
    codes. zero: the number that a step of zero has. before: what all groups use.
    """
    text = "\n{" + _REGISTERS + before
    for group, position in enumerate(positions):
        scale = 2.0 ** (89 - position)
        text += _GROUP_START.format(
            group=group,
            exponent=89 - position,
            scale=_word(scale),
            minus=_word(-(128 + zero) * scale),
            word=4 * outputs,
        )
        of_group = lines
        for output in range(outputs):
            of_group = of_group.replace(f"OUT{output}", f"${4 * output + group}")
        text += of_group
    return text + "\n}\n"


# In: $8 a word with a byte of each group, $9 a word with the ratio in its upper half.
# Out: $0 to $3 multipliers, $4 to $7 offsets, each as both halves of a word.
MINIMUM_STEPS_TO_FACTORS = tl.constexpr(
    _steps(
        """
    lop3.b32 number, both, 0x000F000F, base, 0xEA;
    fma.rn.bf16x2 OUT0, number, scale, minus;
    and.b32 bits, both, 0x00F000F0;
    fma.rn.bf16x2 OUT1, bits, ratio, minus_zero;""",
        2,
        (0, 2, 4, 6),
        before="    prmt.b32 ratio, $9, 0, 0x3232;\n",
    )
)

# In: $12 a word with a byte of each group.
# Out: $0 to $3 multipliers, $4 to $7 offsets of the first and $8 to $11 of the last eight columns of 16.
SHIFTED_STEPS_TO_FACTORS = tl.constexpr(
    _steps(
        f"""
    lop3.b32 number, both, 0x000F000F, base, 0xEA;
    fma.rn.bf16x2 OUT0, number, scale, minus;
    mov.b32 scale, {_word(2.0**-44)};
    mov.b32 minus, {_word(-(2.0**-37))};
    fma.rn.bf16x2 number, number, scale, minus;
    mov.b32 minus, {_word(-0.875)};
    and.b32 bits, both, 0x00100010;
    mov.b32 factor, {_word(-(2.0**127))};
    fma.rn.bf16x2 bits, bits, factor, minus;
    fma.rn.bf16x2 OUT1, number, bits, minus_zero;
    and.b32 bits, both, 0x00200020;
    mov.b32 factor, {_word(-(2.0**126))};
    fma.rn.bf16x2 bits, bits, factor, minus;
    fma.rn.bf16x2 OUT2, number, bits, minus_zero;""",
        3,
        (0, 2, 4, 6),
    )
)

# In: $8 a word with a byte of each group. Out: $0 to $3 multipliers, $4 to $7 offsets.
SIGNED_STEPS_TO_FACTORS = tl.constexpr(
    _steps(
        f"""
    or.b32 number, both, base;
    fma.rn.bf16x2 OUT0, number, scale, minus;
    mov.b32 scale, {_word(-(2.0**-42))};
    mov.b32 minus, {_word(160 * 2.0**-42)};
    fma.rn.bf16x2 OUT1, number, scale, minus;""",
        2,
        (0, 0, 3, 3),
        zero=32.0,
    )
)
