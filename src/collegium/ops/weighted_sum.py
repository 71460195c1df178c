"""Bring expert rows back to their tokens: weight, add in slot order, round once.

Shape letters: T tokens, K experts per token, R rows, H width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["weighted_sum"]


def weighted_sum(rows: Tensor, slots: Tensor, weights: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return ``y [T, H]`` of ``out_dtype``: ``y[t] = sum over k of weights[t, k] * rows[slots[t, k]]``.

    rows: ``[R, H]`` floating. slots: ``[T, K]`` int64 row numbers; one outside ``0..R-1`` (normally -1) is
    dropped and adds nothing, whatever the rows hold. weights: ``[T, K]`` float32. Starting from +0, slots are
    added in the order 0..K-1, each product rounded to float32 before it is added to the float32 sum, and the
    sum is rounded once at the end, so a token's bits do not depend on T.
    Raises ``InputError`` for wrong shapes or dtypes.
    """
    _check(rows, slots, weights, out_dtype)
    count, width = rows.shape
    total = torch.zeros((slots.shape[0], width), dtype=torch.float32, device=rows.device)
    if count == 0:
        return total.to(out_dtype)
    dropped = (slots < 0) | (slots >= count)
    safe = slots.clamp(0, count - 1)
    # Two buffers for all slots: fresh memory for each product costs more than the product.
    gathered = rows.new_empty((slots.shape[0], width))
    product = gathered if rows.dtype == torch.float32 else torch.empty_like(total)
    for k in range(slots.shape[1]):
        torch.index_select(rows, 0, safe[:, k], out=gathered)
        # Two operations on purpose: a fused multiply-add would skip the rounding of the product.
        torch.mul(gathered, weights[:, k, None], out=product)
        # The sum starts from +0 and so is never -0: adding +0 leaves its bits alone.
        total.add_(product.masked_fill_(dropped[:, k, None], 0.0))
    return total.to(out_dtype)


def _check(rows: Tensor, slots: Tensor, weights: Tensor, out_dtype: torch.dtype) -> None:
    if rows.dim() != 2 or not rows.is_floating_point():
        raise InputError(f"rows: found {tuple(rows.shape)} {rows.dtype}, allowed: [R, H] of a floating dtype")
    if slots.dim() != 2 or slots.dtype != torch.int64:
        raise InputError(f"slots: found {tuple(slots.shape)} {slots.dtype}, allowed: [T, K] int64, as permute() makes")
    if tuple(weights.shape) != tuple(slots.shape) or weights.dtype != torch.float32:
        raise InputError(
            f"weights: found {tuple(weights.shape)} {weights.dtype}, allowed: float32 of shape "
            f"{tuple(slots.shape)}, one for each slot"
        )
    if not out_dtype.is_floating_point:
        raise InputError(f"out_dtype: found {out_dtype}, allowed: a floating dtype")
