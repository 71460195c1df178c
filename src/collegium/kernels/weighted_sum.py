"""Expert rows back to their tokens: weight, add in slot order, round once."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    WEIGHTS: tl.constexpr,
    SHARED: tl.constexpr,
    IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``out [T, width]``; a program owns BLOCK columns of one token.

    IDS: slots holds expert ids, the row of assignment (t, k) is t * TOP_K + k, and one with an id that is no expert or
    stands in an earlier slot, or with a weight that is no finite number, is dropped.
    Compiled without fused multiply-adds: each product is rounded to float32 before it is added.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = tl.load(slots + token * TOP_K + k)
        if IDS:
            kept = (slot >= 0) & (slot < experts)
            for before in tl.static_range(k):
                kept = kept & (tl.load(slots + token * TOP_K + before) != slot)
            slot = token * TOP_K + k
            if WEIGHTS:
                kept = kept & (tl.abs(tl.load(weights + token * weight_stride + k).to(tl.float32)) < float("inf"))
        else:
            kept = (slot >= 0) & (slot < count)
        value = tl.load(rows + slot * row_stride + column, mask=inside & kept, other=0.0).to(tl.float32)
        if WEIGHTS:
            # The weight of a dropped slot may be anything.
            weight = tl.load(weights + token * weight_stride + k).to(tl.float32)
            value = value * tl.where(kept, weight, 0.0)
        # The sum starts from +0 and so is never -0: adding +0 leaves its bits alone.
        total = total + value
    if SHARED:
        total = total + tl.load(shared + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
