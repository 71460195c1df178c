"""Weight codes to bfloat16 or float16 operands, in registers.

A sixteen-bit lane holds four codes of one row (or two of eight bits), one from each quarter (or half) of a block of
input columns. Every shift and mask below works on two rows' worth of lanes at once and yields one operand for each
quarter. The device runs PTX on pairs of lanes; the plain form beside it is what the interpreter runs and what the
device form is tested against. All results are exact: see ``experts/triton/packing/`` for the number ranges.
"""

import triton
import triton.language as tl

from . import enums

__all__ = [
    "decoded",
    "divisor",
    "epilogue",
    "has_minima",
    "in_units",
    "is_running",
    "is_whole",
    "joined",
    "look_up",
    "upper_scale",
    "words_of",
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

# Bit positions of an E2M1 code (sign, two exponent bits, mantissa) of quarter q in its lane:
#   quarter 0: 15, 8 7 6   quarter 1: 12, 5 4 3   quarter 2: 9, 2 1 0   quarter 3: 14, 13 11 10
# The first three reach bfloat16's sign, low exponent and high mantissa bits (15, 8 7 6) by one shift.
_E2M1_STEPS = """
    and.b32 a, $4, 0x81C081C0; fma.rn.KIND $0, a, $5, none;
    shl.b32 b, $4, 3; and.b32 b, b, 0x81C081C0; fma.rn.KIND $1, b, $6, none;
    shl.b32 b, $4, 6; and.b32 b, b, 0x81C081C0; fma.rn.KIND $2, b, $7, none;
    shr.u32 a, $4, 5; and.b32 a, a, 0x01000100; shr.u32 b, $4, 4; and.b32 b, b, 0x00C000C0; or.b32 a, a, b;
    shl.b32 b, $4, 1; and.b32 b, b, 0x80008000; or.b32 a, a, b; fma.rn.KIND $3, a, $8, none;
"""
# Beside float16, whose bits those are 15 and 11 10 9:
#   quarter 0: 15, 11 10 9   quarter 1: 12, 8 7 6   quarter 2: 14, 5 4 3   quarter 3: 13, 2 1 0
_E2M1_HALF_STEPS = """
    and.b32 a, $4, 0x8E008E00; fma.rn.KIND $0, a, $5, none;
    shl.b32 b, $4, 3; and.b32 b, b, 0x8E008E00; fma.rn.KIND $1, b, $6, none; shl.b32 b, $4, 1;
    shl.b32 a, $4, 6; and.b32 a, a, 0x0E000E00; lop3.b32 a, b, 0x80008000, a, 0xEA; fma.rn.KIND $2, a, $7, none;
    shl.b32 b, $4, 9; and.b32 b, b, 0x0E000E00; shl.b32 a, $4, 2; lop3.b32 a, a, 0x80008000, b, 0xEA;
    fma.rn.KIND $3, a, $8, none;
"""
# A byte's sign, exponent and mantissa to bfloat16's bit 15 and bits 10 to 4: the value times 2^-120; to float16's bit
# 15 and bits 13 to 7: times 2^-8.
_E4M3_STEPS = """
    shl.b32 a, $2, left; and.b32 a, a, field; shl.b32 b, $2, 8; and.b32 b, b, 0x80008000; or.b32 a, a, b;
    fma.rn.KIND $0, a, $3, none;
    shr.u32 a, $2, right; and.b32 a, a, field; and.b32 b, $2, 0x80008000; or.b32 a, a, b;
    fma.rn.KIND $1, a, $4, none;
"""
# Beside bfloat16 an integer of up to eight bits is one as it is, 2^-133 times itself, and of bits 4 to 7 sixteen times
# that, since exponents 0 and 1 have the same unit. Times 2^127 (2^123) it is a 64th of itself, from which a 64th of the
# zero point is taken. Beside float16 it becomes the low bits of base, 1024; base and the zero point are then taken, of
# bits 4 to 7 a sixteenth of base. 0xEA is "and the first two, or the third", which the compiler does not find itself.
_FOURS = """
    and.b32 a, $4, 0x000F000F; fma.rn.KIND $0, a, lower, $5; and.b32 a, $4, 0x00F000F0; fma.rn.KIND $1, a, upper, $6;
    shr.u32 b, $4, 8;
    and.b32 a, b, 0x000F000F; fma.rn.KIND $2, a, lower, $7; and.b32 a, b, 0x00F000F0; fma.rn.KIND $3, a, upper, $8;
"""
_FOURS_HALF = """
    lop3.b32 a, $4, 0x000F000F, base, 0xEA; add.rn.KIND $0, a, $5;
    lop3.b32 a, $4, 0x00F000F0, base, 0xEA; add.rn.KIND c, $6, most; fma.rn.KIND $1, a, part, c; shr.u32 b, $4, 8;
    lop3.b32 a, b, 0x000F000F, base, 0xEA; add.rn.KIND $2, a, $7;
    lop3.b32 a, b, 0x00F000F0, base, 0xEA; add.rn.KIND c, $8, most; fma.rn.KIND $3, a, part, c;
"""
_BYTES = """
    prmt.b32 a, $2, 0, 0x4240; fma.rn.KIND $0, a, lower, $3; prmt.b32 a, $2, 0, 0x4341; fma.rn.KIND $1, a, lower, $4;
"""
_BYTES_HALF = """
    prmt.b32 a, $2, base, 0x5250; add.rn.KIND $0, a, $3; prmt.b32 a, $2, base, 0x5351; add.rn.KIND $1, a, $4;
"""
# Times a step, which a byte of a word becomes: (1024 + code) * step - 1024 * step. Every second code of four bits stays
# where it is, 16 times what it is, times a sixteenth of its step.
_STEP = "prmt.b32 b, ${}, base, 0x5{q}5{q}; add.rn.f16x2 b, b, away; {part} mul.rn.f16x2 c, b, away;"
_TIMES = "shr.u32 a, ${}, {}; lop3.b32 a, a, {}, base, 0xEA; fma.rn.f16x2 ${}, a, b, c;"
_PART, _MASKS = ("", "mul.rn.f16x2 b, b, part;"), ("0x000F000F", "0x00F000F0")
_STEPPED_FOURS = "".join(
    _STEP.format(5, q=q, part=_PART[q % 2]) + _TIMES.format(4, 8 * (q // 2), _MASKS[q % 2], q) for q in range(4)
)
_STEPPED_BYTES = [
    "".join(_STEP.format(3, q=half + q, part="") + _TIMES.format(2, 8 * q, "0x00FF00FF", q) for q in range(2))
    for half in (0, 2)
]


_NUMBERS = {"none": "0x80008000"}
_BF16 = {"large": "0x7B807B80", "lower": "0x7F007F00", "upper": "0x7D007D00", "left": 4, "right": 4}
_BF16 |= {"field": "0x07F007F0"}
_FP16 = {"base": "0x64006400", "away": "0xE400E400", "part": "0x2C002C00", "most": "0x63806380", "large": "0x5C005C00"}
_FP16 |= {"left": 7, "right": 1, "field": "0x3F803F80"}


def _text(steps: str, constants: dict[str, object]) -> str:
    numbers = constants | _NUMBERS
    moves = "".join(f"mov.b32 {name}, {value};" for name, value in numbers.items())
    steps = steps.replace("KIND", "bf16x2" if constants is _BF16 else "f16x2")
    return f"{{ .reg .b32 a, b, c, {', '.join(numbers)}; {moves} {steps} }}"


_INT4_ASM, _INT4_HALF_ASM = tl.constexpr(_text(_FOURS, _BF16)), tl.constexpr(_text(_FOURS_HALF, _FP16))
_INT8_ASM, _INT8_HALF_ASM = tl.constexpr(_text(_BYTES, _BF16)), tl.constexpr(_text(_BYTES_HALF, _FP16))
_STEPPED_FOURS_ASM = tl.constexpr(_text(_STEPPED_FOURS, _FP16))
_STEPPED_LOW_ASM, _STEPPED_HIGH_ASM = (tl.constexpr(_text(steps, _FP16)) for steps in _STEPPED_BYTES)

_E2M1_ASM, _E2M1_HALF_ASM = tl.constexpr(_text(_E2M1_STEPS, _BF16)), tl.constexpr(_text(_E2M1_HALF_STEPS, _FP16))
_E4M3_ASM, _E4M3_HALF_ASM = (tl.constexpr(_text(_E4M3_STEPS, kind)) for kind in (_BF16, _FP16))
# Without scales, 2^120 or 2^8 takes their place.
_ALONE = _E4M3_STEPS.replace("$3", "large").replace("$4", "large")
_E4M3_ALONE_ASM, _E4M3_ALONE_HALF_ASM = (tl.constexpr(_text(_ALONE, kind)) for kind in (_BF16, _FP16))


@triton.jit
def _as_rows(bits, HALF: tl.constexpr):
    return bits.to(tl.int16).to(tl.float16 if HALF else tl.bfloat16, bitcast=True)


@triton.jit
def _scaled(bits, factor, HALF: tl.constexpr):
    # The interpreter does not convert subnormal bfloat16 numbers; as the upper half of a float32 they are exact.
    value = _as_rows(bits, HALF).to(tl.float32) if HALF else (bits << 16).to(tl.float32, bitcast=True)
    return (value * factor).to(tl.float16 if HALF else tl.bfloat16)


@triton.jit
def _e2m1_quarters(lanes, s0, s1, s2, s3, HALF: tl.constexpr, ASM: tl.constexpr):
    """Return four tensors: code of each quarter times 2^-126 (HALF: 2^-14) times the scale of that quarter."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _E2M1_HALF_ASM if HALF else _E2M1_ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r", [lanes, s0, s1, s2, s3],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
        return _as_rows(a, HALF), _as_rows(b, HALF), _as_rows(c, HALF), _as_rows(d, HALF)
    else:
        bits = lanes.to(tl.int32)
        if HALF:
            a, b = bits & 0x8E00, (bits << 3) & 0x8E00
            c = ((bits << 6) & 0x0E00) | ((bits << 1) & 0x8000)
            d = ((bits << 9) & 0x0E00) | ((bits << 2) & 0x8000)
        else:
            a, b, c = bits & 0x81C0, (bits << 3) & 0x81C0, (bits << 6) & 0x81C0
            d = ((bits >> 5) & 0x0100) | ((bits >> 4) & 0x00C0) | ((bits << 1) & 0x8000)
        return _scaled(a, s0, HALF), _scaled(b, s1, HALF), _scaled(c, s2, HALF), _scaled(d, s3, HALF)


@triton.constexpr_function
def divisor(HALF):
    """Return what integers are divided by in the operands that they are decoded to."""
    return 1.0 if HALF else 64.0


@triton.constexpr_function
def _middle_bits(MIDDLE, HALF):
    """Return the bits of -(1024 + MIDDLE) in float16, or of a 64th of -MIDDLE, zero or a power of two, in bfloat16."""
    return 0xE400 | MIDDLE if HALF else 0x8000 | ((120 + MIDDLE.bit_length()) << 7 if MIDDLE else 0)


@triton.jit
def _minus(word, lanes, MIDDLE: tl.constexpr, ZEROED: tl.constexpr, HALF: tl.constexpr):
    """Return the bits of what is left to add to the numbers that ``lanes`` become in the text above."""
    if not ZEROED:
        # A number by itself: the compiler makes operands in registers of loads and constants alone.
        bits = tl.full((1, 1), _middle_bits(MIDDLE, HALF), tl.int32)
    elif HALF:
        bits = (word & 255)[:, None] | 0xE400
    else:
        bits = ((word & 255)[:, None].to(tl.float32) * -0.015625).to(tl.int32, bitcast=True) >> 16
    spread, _ = tl.broadcast(bits.to(tl.int16), lanes)
    return spread


@triton.jit
def _less(codes, word, MIDDLE: tl.constexpr, ZEROED: tl.constexpr, HALF: tl.constexpr):
    zero = (word & 255)[:, None] if ZEROED else MIDDLE
    return ((codes - zero).to(tl.float32) / divisor(HALF)).to(tl.float16 if HALF else tl.bfloat16)


@triton.jit
def _int4_quarters(
    lanes, n0, n1, n2, n3, MIDDLE: tl.constexpr, ZEROED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Return four tensors, code - zero of each quarter over ``divisor``; quarter q is in bits 4q to 4q+3 of a lane.

    n0 to n3: int32 ``[rows]``, zero points in the low bytes, if ZEROED; otherwise all are MIDDLE. HALF: in float16.
    """
    if ASM:
        m0, m1 = _minus(n0, lanes, MIDDLE, ZEROED, HALF), _minus(n1, lanes, MIDDLE, ZEROED, HALF)
        m2, m3 = _minus(n2, lanes, MIDDLE, ZEROED, HALF), _minus(n3, lanes, MIDDLE, ZEROED, HALF)
        a, b, c, d = tl.inline_asm_elementwise(
            _INT4_HALF_ASM if HALF else _INT4_ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r", [lanes, m0, m1, m2, m3],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
        return _as_rows(a, HALF), _as_rows(b, HALF), _as_rows(c, HALF), _as_rows(d, HALF)
    else:
        a, b, c, d = lanes & 15, (lanes >> 4) & 15, (lanes >> 8) & 15, (lanes >> 12) & 15
        first, second = _less(a, n0, MIDDLE, ZEROED, HALF), _less(b, n1, MIDDLE, ZEROED, HALF)
        return first, second, _less(c, n2, MIDDLE, ZEROED, HALF), _less(d, n3, MIDDLE, ZEROED, HALF)


@triton.jit
def words_of(first, PARTS: tl.constexpr, ASM: tl.constexpr):
    """Return the tables ``[PARTS, 16]`` of an expert as ``look_up`` takes them.

    That is their address, and on the device a word for each lane of a warp, which any lane can ask for.
    """
    if ASM:
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        # A column, because the compiler decodes in the layout of an operand what loads, constants and views lead to.
        return tl.load(first + (tl.full((1, 1), 0, tl.int32) + (lane & (16 * PARTS - 1))))
    else:
        return first


@triton.constexpr_function
def _look_up_text(quarter):
    """Return how two lanes $2, with parts $3, ask for a quarter: larger terms to $0, smaller ones to $1."""
    codes, at = "$2" if quarter % 2 == 0 else "a", 8 * (quarter // 2)
    return f"""{{ .reg .b32 a, b; shr.u32 a, $2, 4; lop3.b32 b, {codes}, 0x0F0F0F0F, $3, 0xEA;
        shr.u32 a, b, {at}; shr.u32 b, b, {at + 16};
        shfl.sync.idx.b32 a, $4, a, 31, 0xFFFFFFFF; shfl.sync.idx.b32 b, $5, b, 31, 0xFFFFFFFF;
        prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, a, b, 0x5410; }}"""


@triton.jit
def look_up(
    lanes, tables, PART: tl.constexpr, STACKED: tl.constexpr, QUARTER: tl.constexpr, HALF: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Return the larger and the smaller terms of the numbers of a quarter of ``lanes``, which are those of INT4.

    PART: whose table they ask; STACKED: rows ask the two parts' in turns of eight.
    """
    part = tl.full((1, 1), 0x1010 * PART, tl.int16)
    if STACKED:
        turns = tl.reshape(tl.join(part, tl.full((1, 1), 0x1010, tl.int16)), (1, 2, 1))
        part = tl.reshape(tl.broadcast_to(turns, (lanes.shape[0] // 16, 2, 8)), (lanes.shape[0], 1))
    if ASM:
        TEXT: tl.constexpr = _look_up_text(QUARTER)
        large, small = tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,r,r,r,r", [lanes, part, tables], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
        )
    else:
        entries = tl.load(tables + (((lanes >> (4 * QUARTER)) & 15) | (part & 16)))
        large, small = (entries >> 16).to(tl.int16), entries.to(tl.int16)
    return _as_rows(large, HALF), _as_rows(small, HALF)


@triton.jit
def _int8_halves(lanes, n0, n1, MIDDLE: tl.constexpr, ZEROED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Return two tensors, code - zero of low and high byte over ``divisor``; zeros as ``_int4_quarters`` says."""
    if ASM:
        m0, m1 = _minus(n0, lanes, MIDDLE, ZEROED, HALF), _minus(n1, lanes, MIDDLE, ZEROED, HALF)
        a, b = tl.inline_asm_elementwise(
            _INT8_HALF_ASM if HALF else _INT8_ASM, "=&r,=&r,r,r,r", [lanes, m0, m1], dtype=(tl.int16, tl.int16),
            is_pure=True, pack=2,
        )  # fmt: skip
        return _as_rows(a, HALF), _as_rows(b, HALF)
    else:
        return _less(lanes & 255, n0, MIDDLE, ZEROED, HALF), _less((lanes >> 8) & 255, n1, MIDDLE, ZEROED, HALF)


@triton.jit
def _stepped_quarters(lanes, lanes1, steps, EIGHT: tl.constexpr, ASM: tl.constexpr):
    """Return four float16 tensors, codes of up to five bits times a step of up to six for each quarter.

    steps: int32 ``[rows]``, a byte a quarter. EIGHT: lanes as ``_int8_halves`` reads them, otherwise those of INT4.
    """
    if ASM:
        spread, _ = tl.broadcast(steps[:, None], lanes)
        if EIGHT:
            a, b = tl.inline_asm_elementwise(
                _STEPPED_LOW_ASM, "=&r,=&r,r,r,r", [lanes, spread], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
            )
            c, d = tl.inline_asm_elementwise(
                _STEPPED_HIGH_ASM, "=&r,=&r,r,r,r", [lanes1, spread], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
            )
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                _STEPPED_FOURS_ASM, "=&r,=&r,=&r,=&r,r,r,r", [lanes, spread],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
        return _as_rows(a, True), _as_rows(b, True), _as_rows(c, True), _as_rows(d, True)
    elif EIGHT:
        first, second = _stepped(lanes & 255, steps, 0), _stepped((lanes >> 8) & 255, steps, 1)
        return first, second, _stepped(lanes1 & 255, steps, 2), _stepped((lanes1 >> 8) & 255, steps, 3)
    else:
        first, second = _stepped(lanes & 15, steps, 0), _stepped((lanes >> 4) & 15, steps, 1)
        return first, second, _stepped((lanes >> 8) & 15, steps, 2), _stepped((lanes >> 12) & 15, steps, 3)


@triton.jit
def _stepped(codes, steps, QUARTER: tl.constexpr):
    return (codes.to(tl.float32) * _step_scale(steps, QUARTER)).to(tl.float16)


@triton.jit
def _e4m3_halves(lanes, s0, s1, SCALED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Return two tensors, the codes of low and high byte: times 2^-120 (HALF: 2^-8) and their scale if SCALED.

    The two NaN codes become 480; checkpoints refuse them.
    """
    if ASM:
        WHOLE: tl.constexpr = _E4M3_HALF_ASM if HALF else _E4M3_ASM
        ALONE: tl.constexpr = _E4M3_ALONE_HALF_ASM if HALF else _E4M3_ALONE_ASM
        a, b = tl.inline_asm_elementwise(
            WHOLE if SCALED else ALONE, "=&r,=&r,r,r,r" if SCALED else "=&r,=&r,r",
            (lanes, s0, s1) if SCALED else (lanes,), dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
        return _as_rows(a, HALF), _as_rows(b, HALF)
    else:
        bits = lanes.to(tl.int32)
        LEFT: tl.constexpr = 7 if HALF else 4
        FIELD: tl.constexpr = 0x3F80 if HALF else 0x07F0
        low = ((bits << LEFT) & FIELD) | ((bits << 8) & 0x8000)
        high = ((bits >> (8 - LEFT)) & FIELD) | (bits & 0x8000)
        return _scaled(low, s0, HALF), _scaled(high, s1, HALF)


@triton.jit
def _e4m3_scale(bytes_, HALF: tl.constexpr):
    """Return an E4M3 group scale times 2^117 (HALF: 2^7): with the factor of E2M1 lanes, 2^-9 (2^-7) is left."""
    small = (bytes_.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return (small * (128.0 if HALF else 1.661534994731145e35)).to(tl.float16 if HALF else tl.bfloat16)


@triton.jit
def _byte_scale(words, like, QUARTER: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr):
    """Return the scale of a quarter, from its byte of ``words [rows]``, in 16 bits and the shape of ``like``.

    E8M0 bytes are exponents of that dtype, 0 is the scale 0: the packer writes at least 1 for scales in use.
    """
    byte = (words >> (8 * QUARTER)) & 255
    scale = _as_rows(byte << (10 if HALF else 7), HALF) if SCALE == E8M0_SCALE else _e4m3_scale(byte, HALF)
    spread, _ = tl.broadcast(scale[:, None], like)
    return spread


@triton.jit
def upper_scale(words):
    """Return the bfloat16 scale in the upper half of each word as a float32 column."""
    return (words & -65536).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _group_scale(words, ZEROED: tl.constexpr):
    """Return the float32 column that ``words`` are, without the zero points in their low bytes."""
    return ((words & -256).to(tl.float32, bitcast=True) if ZEROED else words)[:, None]


@triton.jit
def _half_scale(words):
    """Return the float16 in the lower half of each word as a float32 column."""
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def _step_scale(words, QUARTER: tl.constexpr):
    """Return the signed byte of a quarter of each word as a float32 column."""
    return ((words << (24 - 8 * QUARTER)) >> 24).to(tl.float32)[:, None]


@triton.constexpr_function
def _is_stepped(SCALE, WORDS):
    """Return whether steps of groups are multiplied into codes, which leaves one factor for a whole K block."""
    return (SCALE, WORDS) == (enums.STEP_SCALE, 3)


@triton.constexpr_function
def is_whole(SCALE, WORDS):
    """Return whether the quarters of a K block share one factor or have theirs in the operand."""
    return WORDS == 1 or _is_stepped(SCALE, WORDS)


@triton.constexpr_function
def has_minima(SCALE, WORDS):
    """Return whether weights have minima, which sums of the rows' columns multiply; their codes lose nothing."""
    return _is_stepped(SCALE, WORDS) or (SCALE, WORDS) == (enums.HALF_SCALE, 4)


@triton.constexpr_function
def is_running(WEIGHT):
    """Return whether a sum is kept in units of the factor of the columns that are added last: integers."""
    return WEIGHT in (enums.INT4_LANES, enums.INT8_LANES)


@triton.jit
def in_units(acc, unit, factor, ASM: tl.constexpr):
    """Return ``acc [N, T]``, which counts ``unit [N, 1]``, in units of ``factor``: no product is kept beside it.

    No factor is zero. A sum that has not begun has 0 for its unit.
    """
    if ASM:
        ratio = tl.inline_asm_elementwise(
            "{ .reg .f32 a; rcp.approx.ftz.f32 a, $2; mul.f32 $0, $1, a; }", "=f,f,f", [unit, factor],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        ratio = unit / factor
    return acc * ratio


@triton.jit
def joined(a0, a1, a2, a3):
    """Return the quarters ``[rows, columns]`` of a K block beside each other."""
    # By views alone: so it is made in registers, in the layout of an operand.
    both = tl.join(tl.join(a0, a2), tl.join(a1, a3))
    return tl.reshape(tl.permute(both, (0, 2, 3, 1)), (a0.shape[0], 4 * a0.shape[1]))


@triton.jit
def _minima(m0, m1, m2, m3):
    """Return float16 ``[rows, 32]``, the operand that sums multiply: each of four ``[rows]`` eight times."""
    # By views alone, not from numbers of columns, as ``joined``.
    both = tl.join(tl.join(m0, m2), tl.join(m1, m3))
    rows: tl.constexpr = m0.shape[0]
    return tl.reshape(tl.broadcast_to(tl.reshape(both, (rows, 4, 1)), (rows, 4, 8)), (rows, 32))


@triton.jit
def _minimum(words, QUARTER: tl.constexpr):
    """Return a byte of each word, from 0 to 63, as float16."""
    return ((words >> (8 * QUARTER)) & 255).to(tl.float32).to(tl.float16)


@triton.jit
def _upper_half(words):
    return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _group_factors(scale, step, SCALE: tl.constexpr, WORDS: tl.constexpr):
    """Return words and factors of the quarters of a K block, which share one word, and of minima operand and factor."""
    ZEROED: tl.constexpr = SCALE == ZERO_SCALE
    n0 = tl.load(scale)
    n1 = tl.load(scale + step) if WORDS == 4 else n0
    n2 = tl.load(scale + WORDS // 2 * step) if WORDS > 1 else n0
    n3 = tl.load(scale + 3 * step) if WORDS == 4 else n2
    m = n0, n0
    if SCALE == PAIR_SCALE:
        f0, f1, f2, f3 = upper_scale(n0 << 16), upper_scale(n0), upper_scale(n2 << 16), upper_scale(n2)
    elif SCALE == STEP_SCALE:
        f0, f1 = _half_scale(n0) * _step_scale(n2, 0), _half_scale(n0) * _step_scale(n2, 1)
        f2, f3 = _half_scale(n0) * _step_scale(n2, 2), _half_scale(n0) * _step_scale(n2, 3)
    elif SCALE == HALF_SCALE and WORDS == 2:
        f0, f1, f2, f3 = _half_scale(n0), _half_scale(n0 >> 16), _half_scale(n2), _half_scale(n2 >> 16)
    elif SCALE == HALF_SCALE:
        f0, f1, f2, f3 = _half_scale(n0), _half_scale(n1), _half_scale(n2), _half_scale(n3)
        minima = _minima(_upper_half(n0), _upper_half(n1), _upper_half(n2), _upper_half(n3))
        m = minima, tl.full(f0.shape, 1.0, tl.float32)
    else:
        f0, f1 = _group_scale(n0, ZEROED), _group_scale(n1, ZEROED)
        f2, f3 = _group_scale(n2, ZEROED), _group_scale(n3, ZEROED)
    return n0, n1, n2, n3, (f0, f1, f2, f3), m


@triton.jit
def decoded(
    lanes, lanes1, scale, step, WEIGHT: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr,
    HALF: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the quarters of a K block, of integers as many float32 columns of factors, and what sums multiply.

    lanes1: the second halves of lanes of two. scale: addresses of words, ``step`` apart. Integers lose their zero
    points and are over ``divisor``; where they are stepped there is one factor for a K block. The last is the operand
    of minima and its factor, and without minima means nothing. Scales of other lanes are in the quarters, unless they
    belong to blocks. Codes that look numbers up are for ``look_up``: of these quarters nothing is computed.
    """
    EIGHT: tl.constexpr = (WEIGHT == E4M3_LANES) or (WEIGHT == INT8_LANES)
    if (WEIGHT == E2M1_LANES) or (WEIGHT == E4M3_LANES):
        SCALED: tl.constexpr = (SCALE == E8M0_SCALE) or (SCALE == E4M3_SCALE)
        s0 = 256.0 if HALF else 1.329227995784916e36
        s1, s2, s3 = s0, s0, s0
        if SCALED:
            words = tl.load(scale)
            s0, s1 = _byte_scale(words, lanes, 0, SCALE, HALF), _byte_scale(words, lanes, 1, SCALE, HALF)
            s2, s3 = _byte_scale(words, lanes, 2, SCALE, HALF), _byte_scale(words, lanes, 3, SCALE, HALF)
        if EIGHT:
            a0, a1 = _e4m3_halves(lanes, s0, s1, SCALED, HALF, ASM)
            a2, a3 = _e4m3_halves(lanes1, s2, s3, SCALED, HALF, ASM)
        else:
            a0, a1, a2, a3 = _e2m1_quarters(lanes, s0, s1, s2, s3, HALF, ASM)
        a = (a0, a1, a2, a3)
        return a, a, a
    elif _is_stepped(SCALE, WORDS):
        halves, words = tl.load(scale), tl.load(scale + 2 * step)
        a0, a1, a2, a3 = _stepped_quarters(lanes, lanes1, tl.load(scale + step), EIGHT, ASM)
        f0, f1 = _half_scale(halves), _half_scale(halves >> 16)
        m = _minima(_minimum(words, 0), _minimum(words, 1), _minimum(words, 2), _minimum(words, 3))
        return (a0, a1, a2, a3), (f0,), (m, f1)
    else:
        n0, n1, n2, n3, f, m = _group_factors(scale, step, SCALE, WORDS)
        ZEROED: tl.constexpr = SCALE == ZERO_SCALE
        if EIGHT:
            # Codes of six bits, which steps alone have, lie around 32.
            CENTRE: tl.constexpr = 0 if has_minima(SCALE, WORDS) else 32 if SCALE == STEP_SCALE else 128
            a0, a1 = _int8_halves(lanes, n0, n1, CENTRE, ZEROED, HALF, ASM)
            a2, a3 = _int8_halves(lanes1, n2, n3, CENTRE, ZEROED, HALF, ASM)
        else:
            MIDDLE: tl.constexpr = 0 if has_minima(SCALE, WORDS) else 8
            a0, a1, a2, a3 = _int4_quarters(lanes, n0, n1, n2, n3, MIDDLE, ZEROED, HALF, ASM)
        return (a0, a1, a2, a3), f, m


@triton.jit
def epilogue(acc, ASM: tl.constexpr):
    """Return ``acc`` once its products are done: before that the registers of their first operand must stay.

    Triton 3.6 lets the last product of a loop's step run on while the next step decodes into the registers it reads.
    """
    if ASM:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc
