"""Weight codes to bfloat16 operands, integers to float16 too, in registers.

A sixteen-bit lane holds four codes of one row (or two of eight bits), one from each quarter (or half) of a block of
input columns. Every shift and mask below works on two rows' worth of lanes at once and yields one operand for each
quarter. The device runs PTX on pairs of lanes; the plain form beside it is what the interpreter runs and what the
device form is tested against. All results are exact: see ``experts/triton/lanes.py`` for the number ranges.
"""

import triton
import triton.language as tl

__all__ = [
    "e2m1_quarters",
    "e4m3_halves",
    "e4m3_scale",
    "e8m0_scale",
    "finished",
    "group_scale",
    "half_scale",
    "int4_quarters",
    "int8_halves",
    "step_scale",
    "upper_scale",
]

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
# A byte's sign, exponent and mantissa to bfloat16's bit 15 and bits 10 to 4: the value times 2^-120.
_E4M3_STEPS = """
    shl.b32 a, $2, 4; and.b32 a, a, 0x07F007F0; shl.b32 b, $2, 8; and.b32 b, b, 0x80008000; or.b32 a, a, b;
    fma.rn.KIND $0, a, $3, none;
    shr.u32 a, $2, 4; and.b32 a, a, 0x07F007F0; and.b32 b, $2, 0x80008000; or.b32 a, a, b;
    fma.rn.KIND $1, a, $4, none;
"""
# An integer becomes the low bits of base, 128 (bfloat16) or 1024 (float16); base and the zero point are then taken.
_FOUR = "shr.u32 a, $4, {}; and.b32 a, a, 0x000F000F; or.b32 a, a, base; fma.rn.KIND ${}, a, one, ${};"
_FOURS = "".join(_FOUR.format(4 * q, q, 5 + q) for q in range(4))
_BYTE = "shr.u32 a, $2, {}; and.b32 a, a, 0x00FF00FF; or.b32 a, a, base; fma.rn.KIND ${}, a, one, ${};"
_BYTES = "".join(_BYTE.format(8 * q, q, 3 + q) for q in range(2))
# bfloat16 has room for seven bits beside 128: an upper one is 2, times 64, and joins when 128 is gone.
_SPLIT = """
    shr.u32 a, $2, {0}; and.b32 b, a, 0x00800080; shl.b32 b, b, 7; fma.rn.KIND b, b, up, ${2};
    and.b32 a, a, 0x007F007F; or.b32 a, a, base; fma.rn.KIND a, a, one, less; fma.rn.KIND ${1}, a, one, b;
"""
_SPLITS = "".join(_SPLIT.format(8 * q, q, 3 + q) for q in range(2))


def _text(steps: str, kind: str, one: str, base: str) -> str:
    numbers = {
        "one": one,
        "base": base,
        "less": "0xC300C300",
        "up": "0x42804280",
        "none": "0x80008000",
        "large": "0x7B807B80",
    }
    moves = "".join(f"mov.b32 {name}, {value};" for name, value in numbers.items())
    return f"{{ .reg .b32 a, b, {', '.join(numbers)}; {moves} {steps.replace('KIND', kind)} }}"


_BF16, _FP16 = ("bf16x2", "0x3F803F80", "0x43004300"), ("f16x2", "0x3C003C00", "0x64006400")
_INT4_ASM, _INT4_HALF_ASM = tl.constexpr(_text(_FOURS, *_BF16)), tl.constexpr(_text(_FOURS, *_FP16))
_INT7_ASM = tl.constexpr(_text(_BYTES, *_BF16))
_INT8_ASM, _INT8_HALF_ASM = tl.constexpr(_text(_SPLITS, *_BF16)), tl.constexpr(_text(_BYTES, *_FP16))

_E2M1_ASM, _E4M3_ASM = tl.constexpr(_text(_E2M1_STEPS, *_BF16)), tl.constexpr(_text(_E4M3_STEPS, *_BF16))
# Without scales, 2^120 takes their place.
_E4M3_ALONE_ASM = tl.constexpr(_text(_E4M3_STEPS.replace("$3", "large").replace("$4", "large"), *_BF16))


@triton.jit
def _as_bf16(bits):
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scaled(bits, factor):
    # The interpreter does not convert subnormal bfloat16 numbers; as the upper half of a float32 they are exact.
    wide = (bits << 16).to(tl.float32, bitcast=True)
    return (wide * factor).to(tl.bfloat16)


@triton.jit
def e2m1_quarters(lanes, s0, s1, s2, s3, ASM: tl.constexpr):
    """Return four bfloat16 tensors: code of each quarter times 2^-126 times the bfloat16 scale of that quarter."""
    if ASM:
        return tl.inline_asm_elementwise(
            _E2M1_ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r", [lanes, s0, s1, s2, s3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = lanes.to(tl.int32)
        a = bits & 0x81C0
        b = (bits << 3) & 0x81C0
        c = (bits << 6) & 0x81C0
        d = ((bits >> 5) & 0x0100) | ((bits >> 4) & 0x00C0) | ((bits << 1) & 0x8000)
        f0, f1 = s0.to(tl.float32), s1.to(tl.float32)
        return _scaled(a, f0), _scaled(b, f1), _scaled(c, s2.to(tl.float32)), _scaled(d, s3.to(tl.float32))


@triton.jit
def _as_rows(bits, HALF: tl.constexpr):
    return bits.to(tl.float16 if HALF else tl.bfloat16, bitcast=True)


@triton.jit
def _minus(word, lanes, MIDDLE: tl.constexpr, ZEROED: tl.constexpr, HALF: tl.constexpr):
    """Return the bits of what is left to add to the numbers that ``lanes`` become in the text above."""
    zero = (word & 255)[:, None] if ZEROED else tl.full((1, 1), MIDDLE, tl.int32)
    if HALF:
        bits = zero | 0xE400
    elif MIDDLE < 128:
        bits = zero | 0xC300
    else:
        bits = (-zero.to(tl.float32)).to(tl.int32, bitcast=True) >> 16
    spread, _ = tl.broadcast(bits.to(tl.int16), lanes)
    return spread


@triton.jit
def _less(codes, word, MIDDLE: tl.constexpr, ZEROED: tl.constexpr, HALF: tl.constexpr):
    zero = (word & 255)[:, None] if ZEROED else MIDDLE
    return (codes - zero).to(tl.float32).to(tl.float16 if HALF else tl.bfloat16)


@triton.jit
def int4_quarters(lanes, n0, n1, n2, n3, ZEROED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Return four tensors, code - zero of each quarter; quarter q is in bits 4q to 4q+3 of its lane.

    n0 to n3: int32 ``[rows]``, zero points in the low bytes, if ZEROED; otherwise all are 8. HALF: in float16.
    """
    if ASM:
        m0, m1 = _minus(n0, lanes, 8, ZEROED, HALF), _minus(n1, lanes, 8, ZEROED, HALF)
        m2, m3 = _minus(n2, lanes, 8, ZEROED, HALF), _minus(n3, lanes, 8, ZEROED, HALF)
        a, b, c, d = tl.inline_asm_elementwise(
            _INT4_HALF_ASM if HALF else _INT4_ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r", [lanes, m0, m1, m2, m3],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
        return _as_rows(a, HALF), _as_rows(b, HALF), _as_rows(c, HALF), _as_rows(d, HALF)
    else:
        a, b, c, d = lanes & 15, (lanes >> 4) & 15, (lanes >> 8) & 15, (lanes >> 12) & 15
        first, second = _less(a, n0, 8, ZEROED, HALF), _less(b, n1, 8, ZEROED, HALF)
        return first, second, _less(c, n2, 8, ZEROED, HALF), _less(d, n3, 8, ZEROED, HALF)


@triton.jit
def int8_halves(lanes, n0, n1, MIDDLE: tl.constexpr, ZEROED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Return two tensors, code - zero of low and high byte; zero points as ``int4_quarters`` says, or all are MIDDLE.

    Below 128 codes have seven bits.
    """
    if ASM:
        m0, m1 = _minus(n0, lanes, MIDDLE, ZEROED, HALF), _minus(n1, lanes, MIDDLE, ZEROED, HALF)
        TEXT: tl.constexpr = _INT8_HALF_ASM if HALF else _INT8_ASM if MIDDLE == 128 else _INT7_ASM
        a, b = tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,r,r,r", [lanes, m0, m1], dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
        return _as_rows(a, HALF), _as_rows(b, HALF)
    else:
        return _less(lanes & 255, n0, MIDDLE, ZEROED, HALF), _less((lanes >> 8) & 255, n1, MIDDLE, ZEROED, HALF)


@triton.jit
def e4m3_halves(lanes, s0, s1, SCALED: tl.constexpr, ASM: tl.constexpr):
    """Return two bfloat16 tensors, the codes of low and high byte: times 2^-120 and their scale if SCALED.

    The two NaN codes become 480; checkpoints refuse them.
    """
    if ASM and not SCALED:
        return tl.inline_asm_elementwise(
            _E4M3_ALONE_ASM, "=&r,=&r,r", [lanes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif ASM:
        return tl.inline_asm_elementwise(
            _E4M3_ASM, "=&r,=&r,r,r,r", [lanes, s0, s1], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        bits = lanes.to(tl.int32)
        low = ((bits << 4) & 0x07F0) | ((bits << 8) & 0x8000)
        high = ((bits >> 4) & 0x07F0) | (bits & 0x8000)
        if SCALED:
            s0 = s0.to(tl.float32)
            s1 = s1.to(tl.float32)
        return _scaled(low, s0), _scaled(high, s1)


@triton.jit
def e8m0_scale(bytes_):
    """Return 2^(byte - 127) as bfloat16, 0 for byte 0 (the packer writes 1 to 254 for scales in use)."""
    return _as_bf16(bytes_.to(tl.int32) << 7)


@triton.jit
def e4m3_scale(bytes_):
    """Return an E4M3 group scale times 2^117 as bfloat16: with the 2^-126 of E2M1 lanes, 2^-9 is left to undo."""
    small = (bytes_.to(tl.int32) << 20).to(tl.float32, bitcast=True)
    return ((small * 1.329227995784916e36) * 1.661534994731145e35).to(tl.bfloat16)


@triton.jit
def upper_scale(words):
    """Return the bfloat16 scale in the upper half of each word as a float32 column."""
    return (words & -65536).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def group_scale(words, ZEROED: tl.constexpr):
    """Return the float32 column that ``words`` are, without the zero points in their low bytes."""
    return ((words & -256).to(tl.float32, bitcast=True) if ZEROED else words)[:, None]


@triton.jit
def half_scale(words):
    """Return the float16 in the lower half of each word as a float32 column."""
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def step_scale(words, QUARTER: tl.constexpr):
    """Return the signed byte of a quarter of each word as a float32 column."""
    return ((words << (24 - 8 * QUARTER)) >> 24).to(tl.float32)[:, None]


@triton.jit
def finished(acc, ASM: tl.constexpr):
    """Return ``acc`` once its products are done: before that the registers of their first operand must stay.

    Triton 3.6 lets the last product of a loop's step run on while the next step decodes into the registers it reads.
    """
    if ASM:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc
