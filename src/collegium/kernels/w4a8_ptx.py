"""The PTX that ``w4a8.py`` runs to turn words of eight four-bit codes into E4M3 operands, one block for each format.

A word holds magnitudes in three bits of each nibble: bits 0-2, 4-6, 8-10, 12-14 those of columns c to c + 3 of the
first half, bits 16-18 to 28-30 those of the second half. The signs of the first half are in bits 7, 15, 23, 31, those
of the second half in bits 3, 11, 19, 27.

``prmt`` with the magnitudes as selectors reads four entries of a table of eight bytes, which are two registers. Its
selectors are the low 16 bits. The logic operations of ``lop3``: 0xF8 is first | (second & third), 0xCA is
first ? second : third.
"""

import triton.language as tl

__all__ = ["DECODE_E2M1_E4M3", "DECODE_E2M1_E8M0", "DECODE_INT4"]

# In: $2 word, $3 bytes 0-3 and $7 bytes 4-7 of the table: magnitudes times their scale. $3 to $6 are the same register
# four times, one for each byte of the word, and so are $7 to $10.
# Out: $0 columns of the first half, $1 of the second half, E4M3.
DECODE_E2M1_E8M0 = tl.constexpr("""
{
    .reg .b32 first, second, second_signs, first_values, second_values;

    // Selectors of both halves, without signs; the second half's signs at the top of each byte.
    and.b32 first, $2, 0x77777777;
    shr.u32 second, first, 16;
    shl.b32 second_signs, $2, 4;

    // Magnitudes.
    prmt.b32 first_values, $3, $7, first;
    prmt.b32 second_values, $3, $7, second;

    // Signs.
    lop3.b32 $0, first_values, $2, 0x80808080, 0xF8;
    lop3.b32 $1, second_values, second_signs, 0x80808080, 0xF8;
}
""")

# In: $2 word, codes in two's complement. Out: $0 columns of the first half, $1 of the second half, E4M3.
DECODE_INT4 = tl.constexpr("""
{
    .reg .b32 first, second, second_signs, positive, negative, is_negative;

    // Selectors of both halves, without signs; the second half's signs at the top of each byte.
    and.b32 first, $2, 0x77777777;
    shr.u32 second, first, 16;
    shl.b32 second_signs, $2, 4;

    // First half: E4M3 numbers 0 to 7 and -8 to -1, of which the sign, spread over its byte, selects one.
    prmt.b32 positive, 0x44403800, 0x4E4C4A48, first;
    prmt.b32 negative, 0xCACCCED0, 0xB8C0C4C8, first;
    prmt.b32 is_negative, $2, 0, 0xBA98;
    lop3.b32 $0, is_negative, negative, positive, 0xCA;

    // Second half.
    prmt.b32 positive, 0x44403800, 0x4E4C4A48, second;
    prmt.b32 negative, 0xCACCCED0, 0xB8C0C4C8, second;
    prmt.b32 is_negative, second_signs, 0, 0xBA98;
    lop3.b32 $1, is_negative, negative, positive, 0xCA;
}
""")

# In: $4 word, $5 bytes 0-3 and $9 bytes 4-7 of the table of the first operand, $13 and $17 those of what the second
# operand is less than the first. Each is one of four registers that are the same, as for DECODE_E2M1_E8M0.
# Out: E4M3, $0 first operand and $2 second operand of the first half, $1 and $3 of the second half.
# Additions issue on another pipe than the permutations and logic that limit the kernel: so the second operand is a
# difference, and its sign is that of the first operand.
DECODE_E2M1_E4M3 = tl.constexpr("""
{
    .reg .b32 first, second, second_signs, first_values, second_values;

    // Selectors of both halves, without signs; the second half's signs at the top of each byte.
    and.b32 first, $4, 0x77777777;
    shr.u32 second, first, 16;
    shl.b32 second_signs, $4, 4;

    // First operand: magnitudes, then signs.
    prmt.b32 first_values, $5, $9, first;
    prmt.b32 second_values, $5, $9, second;
    lop3.b32 $0, first_values, $4, 0x80808080, 0xF8;
    lop3.b32 $1, second_values, second_signs, 0x80808080, 0xF8;

    // Second operand. No byte borrows from the next: it is never larger than that of the first operand.
    prmt.b32 first_values, $13, $17, first;
    prmt.b32 second_values, $13, $17, second;
    sub.u32 $2, $0, first_values;
    sub.u32 $3, $1, second_values;
}
""")
