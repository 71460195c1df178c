"""Read memory and keep next to nothing: how many bytes a second a GPU can load."""

import triton
import triton.language as tl

__all__ = ["read_kernel"]


@triton.jit
def read_kernel(words, out, steps, stride, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Write the bitwise or of int32 ``words`` ``[steps * stride]`` that a program reads, ``stride`` words apart."""
    program = tl.program_id(0).to(tl.int64)
    combined = tl.zeros((BLOCK,), tl.int32)
    pointers = words + program * (BLOCK * UNROLL) + tl.arange(0, BLOCK)
    for _ in range(steps):
        for piece in tl.static_range(UNROLL):
            combined = combined | tl.load(pointers + piece * BLOCK)
        pointers += stride
    tl.store(out + program, tl.max(combined, 0))
