"""Scales of E4M3 codes from the largest magnitude of a group, as ``ops/quantize.py`` defines them."""

import triton
import triton.language as tl

__all__ = ["INFINITY", "scaled"]

INFINITY = tl.constexpr(0x7F800000)  # bits of a float32


@triton.jit
def scaled(value, static_scale, POWER_OF_TWO: tl.constexpr):
    """Return float32 ``value [..., GROUP]`` divided by its groups' scales, the scales ``[...]``, and which are finite.

    Results are within +-448. A group with NaN or infinity gets zeros. static_scale: the scale of all other groups, None
    to compute it: the largest magnitude over 448, at least the smallest normal float32; with POWER_OF_TWO rounded up to
    a power of two.
    """
    LAST: tl.constexpr = len(value.shape) - 1
    # As integers, magnitudes order like numbers, with infinity and every NaN above them.
    max_bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, LAST)
    finite = max_bits < INFINITY
    max_bits = tl.where(finite, max_bits, 0)
    if POWER_OF_TWO:
        # 448 is 1.75 * 2^8: the exponent drops by 8, and rises by one for a mantissa above 1.75.
        exponent = tl.maximum((max_bits >> 23) - 8 + ((max_bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(tl.div_rn(max_bits.to(tl.float32, bitcast=True), 448.0), 1.1754943508222875e-38)
    if static_scale is not None:
        scale = tl.where(finite, static_scale, scale)
    multiplier = tl.div_rn(1.0, scale)
    within = tl.where(tl.expand_dims(finite, LAST), value * tl.expand_dims(multiplier, LAST), 0.0)
    return tl.minimum(tl.maximum(within, -448.0), 448.0), scale, finite
