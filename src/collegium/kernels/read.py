"""Read memory and write almost nothing: measures how many bytes a second a GPU can load."""

import triton
import triton.language as tl

__all__ = ["read_kernel"]


@triton.jit
def read_kernel(words, out, steps, stride, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Write ``out [programs]``: the bitwise or of the words that each program reads of int32 ``[steps, stride]``.

    A program reads BLOCK * UNROLL adjacent words of each step.
    """
    program = tl.program_id(0).to(tl.int64)
    combined = tl.zeros((BLOCK,), tl.int32)
    pointers = words + program * (BLOCK * UNROLL) + tl.arange(0, BLOCK)
    for _ in range(steps):
        for i in tl.static_range(UNROLL):
            combined = combined | tl.load(pointers + i * BLOCK)
        pointers += stride
    tl.store(out + program, tl.max(combined, 0))
