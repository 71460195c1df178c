"""Divide rows by their root mean square; a program computes one row."""

import triton
import triton.language as tl

from .tiles import pdl_wait

__all__ = ["rms_norm_kernel"]


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    width,
    x_stride,
    float_width,
    eps,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``out [T, width]`` float32: ``x / sqrt(mean(x * x) + eps) * weight``.

    x: ``[T, width]``. weight: float32 ``[width]``, None for ones. float_width: ``width`` in float32. The row is read in
    STEPS blocks of BLOCK columns, so the order of the sum follows from the width alone. Compiled without fused
    multiply-adds: each product is rounded to float32.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    block_column = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        column = step * BLOCK + block_column
        value = tl.load(x + token * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
        squares += value * value
    mean = tl.div_rn(tl.sum(squares, 0), float_width)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    for step in tl.static_range(STEPS):
        column = step * BLOCK + block_column
        value = tl.load(x + token * x_stride + column, mask=column < width, other=0.0).to(tl.float32) * factor
        if weight is not None:
            value = value * tl.load(weight + column, mask=column < width, other=0.0)
        tl.store(out + token * width + column, value, mask=column < width)
