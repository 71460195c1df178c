"""Bring expert rows back to their tokens: weight, add in slot order, round once.

Shape letters: T tokens, K experts per token, R rows, H width.
"""

import torch
from torch import Tensor

from ..runtime.launch import launch, on_device, overlaps, power_at_least, row_contiguous
from ..runtime.memory import Memory, Regions
from .buffers import Buffers, allocate, sizes
from .checks import require_input

__all__ = ["weighted_sum", "weighted_sum_regions"]

_AT_ONCE = 64  # assignments, half a megabyte of rows of 2,048 numbers


def weighted_sum_regions(tokens: int, width: int, out_dtype: torch.dtype) -> Regions:
    """Return the most bytes ``weighted_sum`` takes without ``out`` for any count of tokens up to ``tokens``."""
    return sizes(_buffers(tokens, width, out_dtype))


def weighted_sum(
    rows: Tensor,
    slots: Tensor,
    weights: Tensor | None,
    out_dtype: torch.dtype,
    *,
    shared: Tensor | None = None,
    out: Tensor | None = None,
    experts: int = 0,
    memory: Memory | None = None,
) -> Tensor:
    """Return ``y [T, H]`` of ``out_dtype``: ``y[t] = sum over k of weights[t, k] * rows[slots[t, k]]``.

    rows: ``[R, H]`` floating. slots: ``[T, K]`` int64 row numbers; -1 adds nothing, whatever rows and weights hold,
    and any other outside ``0..R-1`` makes ``y[t]`` NaN. weights: ``[T, K]`` floating, read as float32, or None for
    ones. shared: ``[T, H]`` floating, added last. Starting from +0, slots are added in the order 0..K-1, each product
    rounded to float32 before it is added to the float32 sum, and the sum is rounded once at the end, so a token's bits
    do not depend on T. out: written and returned instead of fresh memory. experts: not 0 when rows are in the order
    of assignments: slots then holds expert ids of any integer dtype, ``0..experts-1`` or -1. memory: where the kernel
    takes "sum" if no out is given.
    Raises ``InputError`` for wrong shapes or dtypes.
    """
    _check(rows, slots, weights, out_dtype, experts)
    _check_like((slots.shape[0], rows.shape[1]), out_dtype, shared, out)
    if not on_device(rows):
        total = _reference(rows, slots, weights, experts)
        if shared is not None:
            total.add_(shared)
        return total.to(out_dtype) if out is None else out.copy_(total)
    result = out
    if result is None:
        tokens, width = slots.shape[0], rows.shape[1]
        result = allocate(memory, _buffers(tokens, width, out_dtype), rows.device)["sum"]
    if slots.shape[0] > 0:
        _launch(rows, slots, weights, shared, result, experts)
    return result


def _launch(
    rows: Tensor, slots: Tensor, weights: Tensor | None, shared: Tensor | None, out: Tensor, experts: int
) -> None:
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ..kernels.weighted_sum import weighted_sum_kernel

    count, width = rows.shape
    tokens, top_k = slots.shape
    rows, slots = row_contiguous(rows), slots.contiguous()
    weights = None if weights is None else row_contiguous(weights)
    shared = None if shared is None else row_contiguous(shared)
    # Small batches spread a token over more programs.
    block = min(power_at_least(width, 32), 1024 if tokens >= 64 else 256)
    args = (
        rows,
        slots,
        weights,
        shared,
        out,
        count,
        width,
        rows.stride(0),
        0 if weights is None else weights.stride(0),
        0 if shared is None else shared.stride(0),
        experts,
    )
    constants = {
        "TOP_K": top_k,
        "BLOCK": block,
        "UNSORTED": experts > 0,
        "PDL": overlaps(rows),
    }
    warps = max(1, min(4, block // 256))
    launch(weighted_sum_kernel, (-(-width // block), tokens), args, constants, num_warps=warps, enable_fp_fusion=False)


def _reference(rows: Tensor, slots: Tensor, weights: Tensor | None, experts: int) -> Tensor:
    """Return the float32 sum ``[T, H]``, with the bits of the kernel."""
    count, width = rows.shape
    slots = slots.to(torch.int64)
    dropped = (slots < 0) | (slots >= (experts or count))
    lost = (dropped & (slots != -1)).any(dim=1, keepdim=True)
    if experts:
        slots = torch.arange(slots.numel(), device=slots.device).view(slots.shape)
    else:
        slots = slots.masked_fill(dropped, 0)
    # NaN from the start where a slot is neither a row nor -1.
    first = torch.where(lost, torch.nan, 0.0)
    total = first.to(torch.float32).expand(-1, width).clone()
    if count:
        # Few assignments are gathered and weighted at once, more of them slot by slot in the same two buffers: fresh
        # memory for each product costs more than the product.
        step = max(1, slots.shape[1]) if slots.numel() <= _AT_ONCE else 1
        gathered = rows.new_empty((step * slots.shape[0], width))
        product = gathered if rows.dtype == torch.float32 else torch.empty_like(gathered, dtype=torch.float32)
        for start in range(0, slots.shape[1], step):
            span = slice(start, start + step)
            torch.index_select(rows, 0, slots.t()[span].flatten(), out=gathered)
            # Two operations on purpose: a fused multiply-add would skip the rounding of the product.
            torch.mul(gathered, 1.0 if weights is None else weights.float().t()[span].reshape(-1, 1), out=product)
            # The sum is never -0: adding +0 leaves its bits alone.
            product.masked_fill_(dropped.t()[span].reshape(-1, 1), 0.0)
            for slot_product in product.view(step, *total.shape).unbind():
                total.add_(slot_product)
    return total


def _buffers(tokens: int, width: int, out_dtype: torch.dtype) -> Buffers:
    return {"sum": ((tokens, width), out_dtype)}


def _check(rows: Tensor, slots: Tensor, weights: Tensor | None, out_dtype: torch.dtype, experts: int) -> None:
    require_input(rows.dim() == 2 and rows.is_floating_point(), "rows", rows, "[R, H] of a floating dtype")
    if experts:
        fits = slots.numel() == rows.shape[0] and not slots.is_floating_point()
        require_input(fits, "slots", slots, "an expert id for each of the rows")
    valid = slots.dim() == 2 and (experts > 0 or slots.dtype == torch.int64)
    require_input(valid, "slots", slots, "[T, K] int64, as permute() returns")
    if weights is not None:
        fits = weights.shape == slots.shape and weights.is_floating_point()
        require_input(fits, "weights", weights, f"floating of shape {tuple(slots.shape)}, one for each slot")
    require_input(out_dtype.is_floating_point, "out_dtype", out_dtype, "a floating dtype")


def _check_like(shape: tuple[int, int], out_dtype: torch.dtype, shared: Tensor | None, out: Tensor | None) -> None:
    if shared is not None:
        require_input(shared.shape == shape and shared.is_floating_point(), "shared", shared, f"floating {shape}")
    if out is not None:
        fits = out.shape == shape and out.dtype == out_dtype and out.is_contiguous()
        require_input(fits, "out", out, f"contiguous {shape} {out_dtype}")
