"""Rows divided by their root mean square, a row a program."""

import triton
import triton.language as tl

from .tiles import pdl_wait

__all__ = ["rms_norm_kernel"]


@triton.jit
def rms_norm_kernel(
    x, weight, out, width, x_stride, count, eps,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, WEIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out [T, width]`` float32: ``x / sqrt(mean(x * x) + eps)``, times ``weight [width]`` with WEIGHT.

    count: ``width`` in float32. The row is read in STEPS blocks of BLOCK columns, so the order of the sum follows from
    the width alone. Compiled without fused multiply-adds: each product is rounded to float32.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        at = step * BLOCK + column
        value = tl.load(x + token * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
        squares += value * value
    mean = tl.div_rn(tl.sum(squares, 0), count)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    for step in tl.static_range(STEPS):
        at = step * BLOCK + column
        value = tl.load(x + token * x_stride + at, mask=at < width, other=0.0).to(tl.float32) * factor
        if WEIGHT:
            value = value * tl.load(weight + at, mask=at < width, other=0.0)
        tl.store(out + token * width + at, value, mask=at < width)
