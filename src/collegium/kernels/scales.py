"""Scales of E4M3 codes from the largest magnitude of a group, as ``ops/quantize.py`` defines them."""

import triton
import triton.language as tl

__all__ = ["INFINITY", "scaled"]

INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def scaled(value, fixed, POWER: tl.constexpr):
    """Return float32 ``value [..., GROUP]`` over its groups' scales, within 448, those scales, and what is finite.

    A group with NaN or infinity gets zeros. fixed: the scale of all others, None for one that is found here: the
    largest magnitude over 448, at least the smallest normal float32, with POWER the next power of two.
    """
    last: tl.constexpr = len(value.shape) - 1
    # As integers, magnitudes order like numbers, with infinity and every NaN above them.
    max_bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, last)
    finite = max_bits < INFINITY
    max_bits = tl.where(finite, max_bits, 0)
    if POWER:
        # 448 is 1.75 * 2^8: the exponent drops by 8, and rises by one for a mantissa above 1.75.
        byte = tl.maximum((max_bits >> 23) - 8 + ((max_bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
        scale = (byte << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.div_rn(max_bits.to(tl.float32, bitcast=True), 448.0), 1.1754943508222875e-38)
    if fixed is not None:
        scale = tl.where(finite, fixed, scale)
    within = tl.where(tl.expand_dims(finite, last), value * tl.expand_dims(tl.div_rn(1.0, scale), last), 0.0)
    return tl.minimum(tl.maximum(within, -448.0), 448.0), scale, finite
