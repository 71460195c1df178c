"""Scales of E4M3 codes from the largest magnitude of a group, as ``ops/quantize.py`` defines them."""

import triton
import triton.language as tl

__all__ = ["exact_scale", "power_byte"]


@triton.jit
def power_byte(bits):
    """Return the E8M0 byte of the least power of two that saturates nothing, for the bits of the largest magnitude."""
    # 448 is 1.75 * 2^8: the exponent drops by 8, and rises by one for a mantissa above 1.75.
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.maximum(byte, 1)


@triton.jit
def exact_scale(amax):
    """Return amax / 448, at least the smallest normal float32."""
    return tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
