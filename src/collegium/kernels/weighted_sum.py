"""Return expert rows to their tokens: weight, add in slot order, round once."""

import triton
import triton.language as tl

from .tiles import pdl_wait

__all__ = ["weighted_sum_kernel"]


@triton.jit(do_not_specialize=["count", "weight_stride"], do_not_specialize_on_alignment=["slots", "weights"])
def weighted_sum_kernel(
    rows,
    slots,
    weights,
    shared,
    out,
    count,
    width,
    row_stride,
    weight_stride,
    shared_stride,
    experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    UNSORTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``out [T, width]``; a program computes BLOCK columns of one token.

    rows: ``[count, width]``. slots: integers ``[T, TOP_K]``; -1 adds nothing, whatever its weight, and any other value
    that is no row makes the token NaN. weights: ``[T, TOP_K]``, None for ones. shared: ``[T, width]``, added last, or
    None.
    UNSORTED: slots are expert ids below ``experts``, and the row of assignment (t, k) is t * TOP_K + k.
    Compiled without fused multiply-adds: each product is rounded to float32 before it is added.
    """
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        # As int64, no unsigned id is -1.
        slot = tl.load(slots + token * TOP_K + k).to(tl.int64)
        present = (slot >= 0) & (slot < (experts if UNSORTED else count))
        # An absent row is read as 0, which this factor makes 0 or NaN.
        absent = tl.where(slot == -1, 0.0, float("nan"))
        row = token * TOP_K + k if UNSORTED else slot
        # Not ``inside & present``: Triton's interpreter rejects a mask made with a scalar.
        value = tl.load(rows + row * row_stride + column, mask=column < tl.where(present, width, 0), other=0.0)
        value = value.to(tl.float32)
        weight = 1.0
        if weights is not None:
            weight = tl.load(weights + token * weight_stride + k).to(tl.float32)
        # The sum starts from +0 and so is never -0: adding +0 leaves its bits alone.
        total = total + value * tl.where(present, weight, absent)
    if shared is not None:
        total = total + tl.load(shared + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
