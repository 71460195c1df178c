"""The PTX that ``decode.py`` runs to turn codes into bfloat16 or float16 operands, one block for each case.

A 32-bit register holds a pair of 16-bit lanes, so each instruction works on both, and each result is a pair of 16-bit
numbers. ``packing/interleave.py`` states which bits of a lane belong to which quarter (or half) of a K block.

How bits become numbers, all without rounding:

- E2M1 and E4M3 codes: sign, exponent and mantissa are moved to the top of the mantissa and the bottom of the exponent
  of the wider type. That is the code's value times a power of two, since the exponent bias is smaller; subnormal codes
  become subnormal numbers. One multiplication by the scale follows.
- Integers in bfloat16: up to eight bits at the bottom of the number are the subnormal or smallest normal number code *
  2^-133, because exponents 0 and 1 have the same unit. A multiplication by 2^127 makes it code / 64; bits 4 to 7 are
  16 times the code and are multiplied by 2^123.
- Integers in float16: up to eight bits at the bottom of 1024.0 are the number 1024 + code. Adding -(1024 + zero point)
  leaves code - zero point.

``fma`` with -0.0 as the last operand is a multiplication: adding -0.0 changes no number, zeros included. The logic
operation 0xEA of ``lop3`` is (first & second) | third; the compiler does not find it by itself.
"""

import triton.language as tl

__all__ = [
    "E2M1_TO_BF16",
    "E2M1_TO_FP16",
    "E4M3_TO_BF16",
    "E4M3_TO_BF16_UNSCALED",
    "E4M3_TO_FP16",
    "E4M3_TO_FP16_UNSCALED",
    "FOUR_BITS_TIMES_STEP",
    "HIGH_BYTES_TIMES_STEP",
    "INT4_TO_BF16",
    "INT4_TO_FP16",
    "INT8_TO_BF16",
    "INT8_TO_FP16",
    "LOOK_UP",
    "LOW_BYTES_TIMES_STEP",
    "RESCALE",
]

# In: $4 lanes, $5 to $8 scales of quarters 0 to 3. Out: $0 to $3, the quarters times 2^-126 and their scale.
# Bits of a lane (sign; exponent and mantissa): quarter 0: 15; 8 7 6. 1: 12; 5 4 3. 2: 9; 2 1 0. 3: 14; 13 11 10.
E2M1_TO_BF16 = tl.constexpr("""
{
    .reg .b32 code, bits, minus_zero;
    mov.b32 minus_zero, 0x80008000;

    // Quarter 0 is in place: sign at 15, exponent and mantissa at 8 to 6.
    and.b32 code, $4, 0x81C081C0;
    fma.rn.bf16x2 $0, code, $5, minus_zero;

    // Quarter 1 lies three bits lower.
    shl.b32 code, $4, 3;
    and.b32 code, code, 0x81C081C0;
    fma.rn.bf16x2 $1, code, $6, minus_zero;

    // Quarter 2 lies six bits lower.
    shl.b32 code, $4, 6;
    and.b32 code, code, 0x81C081C0;
    fma.rn.bf16x2 $2, code, $7, minus_zero;

    // Quarter 3 is in three places: exponent bit 13, then bits 11 and 10, then the sign at 14.
    shr.u32 code, $4, 5;
    and.b32 code, code, 0x01000100;
    shr.u32 bits, $4, 4;
    and.b32 bits, bits, 0x00C000C0;
    or.b32 code, code, bits;
    shl.b32 bits, $4, 1;
    and.b32 bits, bits, 0x80008000;
    or.b32 code, code, bits;
    fma.rn.bf16x2 $3, code, $8, minus_zero;
}
""")

# In: $4 lanes, $5 to $8 scales of quarters 0 to 3. Out: $0 to $3, the quarters times 2^-14 and their scale.
# Bits of a lane (sign; exponent and mantissa): quarter 0: 15; 11 10 9. 1: 12; 8 7 6. 2: 14; 5 4 3. 3: 13; 2 1 0.
E2M1_TO_FP16 = tl.constexpr("""
{
    .reg .b32 code, sign, minus_zero;
    mov.b32 minus_zero, 0x80008000;

    // Quarter 0 is in place: sign at 15, exponent and mantissa at 11 to 9.
    and.b32 code, $4, 0x8E008E00;
    fma.rn.f16x2 $0, code, $5, minus_zero;

    // Quarter 1 lies three bits lower.
    shl.b32 code, $4, 3;
    and.b32 code, code, 0x8E008E00;
    fma.rn.f16x2 $1, code, $6, minus_zero;

    // Quarter 2: the sign from 14, the other bits from 5 to 3.
    shl.b32 sign, $4, 1;
    shl.b32 code, $4, 6;
    and.b32 code, code, 0x0E000E00;
    lop3.b32 code, sign, 0x80008000, code, 0xEA;
    fma.rn.f16x2 $2, code, $7, minus_zero;

    // Quarter 3: the other bits from 2 to 0, the sign from 13.
    shl.b32 code, $4, 9;
    and.b32 code, code, 0x0E000E00;
    shl.b32 sign, $4, 2;
    lop3.b32 code, sign, 0x80008000, code, 0xEA;
    fma.rn.f16x2 $3, code, $8, minus_zero;
}
""")

# In: $2 lanes, $3 and $4 scales of low and high bytes. Out: $0 low bytes, $1 high bytes, times 2^-120 and their scale.
E4M3_TO_BF16 = tl.constexpr("""
{
    .reg .b32 code, sign, minus_zero;
    mov.b32 minus_zero, 0x80008000;

    // Low byte: bits 6 to 0 to bits 10 to 4, the sign from 7 to 15.
    shl.b32 code, $2, 4;
    and.b32 code, code, 0x07F007F0;
    shl.b32 sign, $2, 8;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.bf16x2 $0, code, $3, minus_zero;

    // High byte: bits 14 to 8 to bits 10 to 4; its sign is in place.
    shr.u32 code, $2, 4;
    and.b32 code, code, 0x07F007F0;
    and.b32 sign, $2, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.bf16x2 $1, code, $4, minus_zero;
}
""")

# In: $2 lanes, $3 and $4 scales of low and high bytes. Out: $0 low bytes, $1 high bytes, times 2^-8 and their scale.
E4M3_TO_FP16 = tl.constexpr("""
{
    .reg .b32 code, sign, minus_zero;
    mov.b32 minus_zero, 0x80008000;

    // Low byte: bits 6 to 0 to bits 13 to 7, the sign from 7 to 15.
    shl.b32 code, $2, 7;
    and.b32 code, code, 0x3F803F80;
    shl.b32 sign, $2, 8;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.f16x2 $0, code, $3, minus_zero;

    // High byte: bits 14 to 8 to bits 13 to 7; its sign is in place.
    shr.u32 code, $2, 1;
    and.b32 code, code, 0x3F803F80;
    and.b32 sign, $2, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.f16x2 $1, code, $4, minus_zero;
}
""")

# In: $2 lanes. Out: $0 low bytes, $1 high bytes.
E4M3_TO_BF16_UNSCALED = tl.constexpr("""
{
    .reg .b32 code, sign, rebias, minus_zero;
    mov.b32 rebias, 0x7B807B80;      // 2^120
    mov.b32 minus_zero, 0x80008000;

    // Low byte: bits 6 to 0 to bits 10 to 4, the sign from 7 to 15.
    shl.b32 code, $2, 4;
    and.b32 code, code, 0x07F007F0;
    shl.b32 sign, $2, 8;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.bf16x2 $0, code, rebias, minus_zero;

    // High byte: bits 14 to 8 to bits 10 to 4; its sign is in place.
    shr.u32 code, $2, 4;
    and.b32 code, code, 0x07F007F0;
    and.b32 sign, $2, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.bf16x2 $1, code, rebias, minus_zero;
}
""")

# In: $2 lanes. Out: $0 low bytes, $1 high bytes.
E4M3_TO_FP16_UNSCALED = tl.constexpr("""
{
    .reg .b32 code, sign, rebias, minus_zero;
    mov.b32 rebias, 0x5C005C00;      // 2^8
    mov.b32 minus_zero, 0x80008000;

    // Low byte: bits 6 to 0 to bits 13 to 7, the sign from 7 to 15.
    shl.b32 code, $2, 7;
    and.b32 code, code, 0x3F803F80;
    shl.b32 sign, $2, 8;
    and.b32 sign, sign, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.f16x2 $0, code, rebias, minus_zero;

    // High byte: bits 14 to 8 to bits 13 to 7; its sign is in place.
    shr.u32 code, $2, 1;
    and.b32 code, code, 0x3F803F80;
    and.b32 sign, $2, 0x80008000;
    or.b32 code, code, sign;
    fma.rn.f16x2 $1, code, rebias, minus_zero;
}
""")

# In: $4 lanes, $5 to $8 -zero / 64 of quarters 0 to 3. Out: $0 to $3, (code - zero) / 64 of the quarters.
INT4_TO_BF16 = tl.constexpr("""
{
    .reg .b32 codes, high_byte, scale_0_3, scale_4_7;
    mov.b32 scale_0_3, 0x7F007F00;   // 2^127
    mov.b32 scale_4_7, 0x7D007D00;   // 2^123

    // Quarter 0: bits 0 to 3. Quarter 1: bits 4 to 7.
    and.b32 codes, $4, 0x000F000F;
    fma.rn.bf16x2 $0, codes, scale_0_3, $5;
    and.b32 codes, $4, 0x00F000F0;
    fma.rn.bf16x2 $1, codes, scale_4_7, $6;

    // Quarters 2 and 3: the same bits of the high byte.
    shr.u32 high_byte, $4, 8;
    and.b32 codes, high_byte, 0x000F000F;
    fma.rn.bf16x2 $2, codes, scale_0_3, $7;
    and.b32 codes, high_byte, 0x00F000F0;
    fma.rn.bf16x2 $3, codes, scale_4_7, $8;
}
""")

# In: $4 lanes, $5 to $8 -(1024 + zero) of quarters 0 to 3. Out: $0 to $3, code - zero of the quarters.
# Bits 4 to 7 make 1024 + 16 * code, a sixteenth of which is 64 + code.
INT4_TO_FP16 = tl.constexpr("""
{
    .reg .b32 number, high_byte, minus_64, base, sixteenth, plus_960;
    mov.b32 base, 0x64006400;        // 1024
    mov.b32 sixteenth, 0x2C002C00;   // 1 / 16
    mov.b32 plus_960, 0x63806380;    // 960 = 1024 - 64

    // Quarter 0: bits 0 to 3.
    lop3.b32 number, $4, 0x000F000F, base, 0xEA;
    add.rn.f16x2 $0, number, $5;

    // Quarter 1: bits 4 to 7. -(1024 + zero) + 960 = -(64 + zero).
    lop3.b32 number, $4, 0x00F000F0, base, 0xEA;
    add.rn.f16x2 minus_64, $6, plus_960;
    fma.rn.f16x2 $1, number, sixteenth, minus_64;

    // Quarters 2 and 3: the same bits of the high byte.
    shr.u32 high_byte, $4, 8;
    lop3.b32 number, high_byte, 0x000F000F, base, 0xEA;
    add.rn.f16x2 $2, number, $7;
    lop3.b32 number, high_byte, 0x00F000F0, base, 0xEA;
    add.rn.f16x2 minus_64, $8, plus_960;
    fma.rn.f16x2 $3, number, sixteenth, minus_64;
}
""")

# In: $2 lanes, $3 and $4 -zero / 64 of low and high bytes. Out: $0 low, $1 high bytes, (code - zero) / 64.
INT8_TO_BF16 = tl.constexpr("""
{
    .reg .b32 codes, scale;
    mov.b32 scale, 0x7F007F00;       // 2^127

    // Low bytes of both lanes, bytes 0 and 2; high bytes, 1 and 3. Selector 4 is a byte of zero.
    prmt.b32 codes, $2, 0, 0x4240;
    fma.rn.bf16x2 $0, codes, scale, $3;
    prmt.b32 codes, $2, 0, 0x4341;
    fma.rn.bf16x2 $1, codes, scale, $4;
}
""")

# In: $2 lanes, $3 and $4 -(1024 + zero) of low and high bytes. Out: $0 low, $1 high bytes, code - zero.
INT8_TO_FP16 = tl.constexpr("""
{
    .reg .b32 number, base;
    mov.b32 base, 0x64006400;        // 1024

    // Low bytes of both lanes, bytes 0 and 2; high bytes, 1 and 3. Selector 5 is the upper byte of base.
    prmt.b32 number, $2, base, 0x5250;
    add.rn.f16x2 $0, number, $3;
    prmt.b32 number, $2, base, 0x5351;
    add.rn.f16x2 $1, number, $4;
}
""")

# In: $4 lanes of four-bit codes, $5 a word with the step of quarter q in byte q, for both lanes of the pair.
# Out: $0 to $3, code * step of the quarters: (1024 + code) * step - 1024 * step.
# Bits 4 to 7 make 1024 + 16 * code, which is multiplied by a sixteenth of the step.
FOUR_BITS_TIMES_STEP = tl.constexpr("""
{
    .reg .b32 number, high_byte, step, offset, base, minus_base, sixteenth;
    mov.b32 base, 0x64006400;        // 1024
    mov.b32 minus_base, 0xE400E400;  // -1024
    mov.b32 sixteenth, 0x2C002C00;   // 1 / 16

    // Quarter 0: its step (1024 + byte, minus 1024), then bits 0 to 3.
    prmt.b32 step, $5, base, 0x5050;
    add.rn.f16x2 step, step, minus_base;
    mul.rn.f16x2 offset, step, minus_base;
    lop3.b32 number, $4, 0x000F000F, base, 0xEA;
    fma.rn.f16x2 $0, number, step, offset;

    // Quarter 1: bits 4 to 7.
    prmt.b32 step, $5, base, 0x5151;
    add.rn.f16x2 step, step, minus_base;
    mul.rn.f16x2 step, step, sixteenth;
    mul.rn.f16x2 offset, step, minus_base;
    lop3.b32 number, $4, 0x00F000F0, base, 0xEA;
    fma.rn.f16x2 $1, number, step, offset;

    // Quarter 2: bits 8 to 11.
    prmt.b32 step, $5, base, 0x5252;
    add.rn.f16x2 step, step, minus_base;
    mul.rn.f16x2 offset, step, minus_base;
    shr.u32 high_byte, $4, 8;
    lop3.b32 number, high_byte, 0x000F000F, base, 0xEA;
    fma.rn.f16x2 $2, number, step, offset;

    // Quarter 3: bits 12 to 15.
    prmt.b32 step, $5, base, 0x5353;
    add.rn.f16x2 step, step, minus_base;
    mul.rn.f16x2 step, step, sixteenth;
    mul.rn.f16x2 offset, step, minus_base;
    lop3.b32 number, high_byte, 0x00F000F0, base, 0xEA;
    fma.rn.f16x2 $3, number, step, offset;
}
""")

# In: $2 lanes of quarters 0 (low byte) and 1 (high byte), $3 a word with the step of quarter q in byte q.
# Out: $0 and $1, code * step of quarters 0 and 1: (1024 + code) * step - 1024 * step.
LOW_BYTES_TIMES_STEP = tl.constexpr("""
{
    .reg .b32 number, step, offset, base, minus_base;
    mov.b32 base, 0x64006400;        // 1024
    mov.b32 minus_base, 0xE400E400;  // -1024

    // Quarter 0: its step (1024 + byte, minus 1024), then the low byte.
    prmt.b32 step, $3, base, 0x5050;
    add.rn.f16x2 step, step, minus_base;
    mul.rn.f16x2 offset, step, minus_base;
    lop3.b32 number, $2, 0x00FF00FF, base, 0xEA;
    fma.rn.f16x2 $0, number, step, offset;

    // Quarter 1: the high byte.
    prmt.b32 step, $3, base, 0x5151;
    add.rn.f16x2 step, step, minus_base;
    mul.rn.f16x2 offset, step, minus_base;
    shr.u32 number, $2, 8;
    lop3.b32 number, number, 0x00FF00FF, base, 0xEA;
    fma.rn.f16x2 $1, number, step, offset;
}
""")

# As LOW_BYTES_TIMES_STEP for lanes of quarters 2 (low byte) and 3 (high byte).
HIGH_BYTES_TIMES_STEP = tl.constexpr("""
{
    .reg .b32 number, step, offset, base, minus_base;
    mov.b32 base, 0x64006400;        // 1024
    mov.b32 minus_base, 0xE400E400;  // -1024

    // Quarter 2: its step (1024 + byte, minus 1024), then the low byte.
    prmt.b32 step, $3, base, 0x5252;
    add.rn.f16x2 step, step, minus_base;
    mul.rn.f16x2 offset, step, minus_base;
    lop3.b32 number, $2, 0x00FF00FF, base, 0xEA;
    fma.rn.f16x2 $0, number, step, offset;

    // Quarter 3: the high byte.
    prmt.b32 step, $3, base, 0x5353;
    add.rn.f16x2 step, step, minus_base;
    mul.rn.f16x2 offset, step, minus_base;
    shr.u32 number, $2, 8;
    lop3.b32 number, number, 0x00FF00FF, base, 0xEA;
    fma.rn.f16x2 $1, number, step, offset;
}
""")

# By quarter: code q of both lanes $2 selects a word of the table that the lanes of the warp hold in $4 and $5 (the same
# register twice). $3: 16 in each byte of a lane that reads the second table, otherwise 0.
# Out: $0 upper halves of the words, the larger terms; $1 lower halves, the smaller terms.
# shfl.sync.idx reads five bits of its index: 16 * table + code.
LOOK_UP = (
    """
{
    .reg .b32 index, index_1, word_0, word_1;

    // Bits 0 to 3 of both lanes.
    lop3.b32 index, $2, 0x0F0F0F0F, $3, 0xEA;
    shr.u32 index_1, index, 16;
    shfl.sync.idx.b32 word_0, $4, index, 31, 0xFFFFFFFF;
    shfl.sync.idx.b32 word_1, $5, index_1, 31, 0xFFFFFFFF;
    prmt.b32 $0, word_0, word_1, 0x7632;
    prmt.b32 $1, word_0, word_1, 0x5410;
}
""",
    """
{
    .reg .b32 codes, index, index_1, word_0, word_1;

    // Bits 4 to 7 of both lanes.
    shr.u32 codes, $2, 4;
    lop3.b32 index, codes, 0x0F0F0F0F, $3, 0xEA;
    shr.u32 index_1, index, 16;
    shfl.sync.idx.b32 word_0, $4, index, 31, 0xFFFFFFFF;
    shfl.sync.idx.b32 word_1, $5, index_1, 31, 0xFFFFFFFF;
    prmt.b32 $0, word_0, word_1, 0x7632;
    prmt.b32 $1, word_0, word_1, 0x5410;
}
""",
    """
{
    .reg .b32 index, index_0, index_1, word_0, word_1;

    // Bits 8 to 11 of both lanes.
    lop3.b32 index, $2, 0x0F0F0F0F, $3, 0xEA;
    shr.u32 index_0, index, 8;
    shr.u32 index_1, index, 24;
    shfl.sync.idx.b32 word_0, $4, index_0, 31, 0xFFFFFFFF;
    shfl.sync.idx.b32 word_1, $5, index_1, 31, 0xFFFFFFFF;
    prmt.b32 $0, word_0, word_1, 0x7632;
    prmt.b32 $1, word_0, word_1, 0x5410;
}
""",
    """
{
    .reg .b32 codes, index, index_0, index_1, word_0, word_1;

    // Bits 12 to 15 of both lanes.
    shr.u32 codes, $2, 4;
    lop3.b32 index, codes, 0x0F0F0F0F, $3, 0xEA;
    shr.u32 index_0, index, 8;
    shr.u32 index_1, index, 24;
    shfl.sync.idx.b32 word_0, $4, index_0, 31, 0xFFFFFFFF;
    shfl.sync.idx.b32 word_1, $5, index_1, 31, 0xFFFFFFFF;
    prmt.b32 $0, word_0, word_1, 0x7632;
    prmt.b32 $1, word_0, word_1, 0x5410;
}
""",
)

# In: $1 numerator, $2 denominator. Out: $0, their approximate ratio.
RESCALE = tl.constexpr("""
{
    .reg .f32 reciprocal;
    rcp.approx.ftz.f32 reciprocal, $2;
    mul.f32 $0, $1, reciprocal;
}
""")
