"""Expert rows back to their tokens: weight, add in slot order, round once."""

import triton
import triton.language as tl

from .tiles import pdl_wait

__all__ = ["weighted_sum_kernel"]


@triton.jit(do_not_specialize=["count", "weight_stride"], do_not_specialize_on_alignment=["slots", "weights"])
def weighted_sum_kernel(
    rows, slots, weights, shared, out, count, width, row_stride, weight_stride, shared_stride, experts,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr, SHARED: tl.constexpr, IDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out [T, width]``; a program owns BLOCK columns of one token.

    A slot of -1 adds nothing, whatever its weight is; any other that is no row makes the token NaN. IDS: slots holds
    expert ids, and the row of assignment (t, k) is t * TOP_K + k.
    Compiled without fused multiply-adds: each product is rounded to float32 before it is added.
    """
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        # In 64 bits, where no unsigned id is -1.
        slot = tl.load(slots + token * TOP_K + k).to(tl.int64)
        present = (slot >= 0) & (slot < (experts if IDS else count))
        # What is not there is read as 0, which the factor makes 0 or NaN.
        absent = tl.where(slot == -1, 0.0, float("nan"))
        row = token * TOP_K + k if IDS else slot
        # Not ``inside & kept``: Triton's interpreter refuses a mask made with a scalar.
        value = tl.load(rows + row * row_stride + column, mask=column < tl.where(present, width, 0), other=0.0)
        value = value.to(tl.float32)
        weight = 1.0
        if WEIGHTS:
            weight = tl.load(weights + token * weight_stride + k).to(tl.float32)
        # The sum starts from +0 and so is never -0: adding +0 leaves its bits alone.
        total = total + value * tl.where(present, weight, absent)
    if SHARED:
        total = total + tl.load(shared + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
