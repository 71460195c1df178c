"""Rows of activations as operands of a grouped product: themselves, or codes and scales in the product's order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..runtime.launch import on_device
from .quantize import AS_IS, PADDED, cast_name, quantize_on_device, quantize_rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["operand", "ordered"]


def operand(
    x: Tensor,
    name: str | None,
    *,
    source: Tensor | None = None,
    weights: Tensor | None = None,
    order: int = AS_IS,
    late: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return rows of ``x [T, K]`` as a product reads them: codes and scales of a format, or x's dtype and None.

    source and weights as in ``quantize_rows``; without them and without a format x itself is returned. order: of
    E4M3 codes, one of AS_IS, PADDED and REORDERED. late: x was there before the kernel launched last began, and what
    is written here is no memory that kernel uses, so both may run at the same time.
    """
    if name is None:
        if source is None and weights is None:
            return x if x.stride(-1) == 1 else x.contiguous(), None
        name = cast_name(x.dtype)
    if (order != AS_IS or late) and on_device(x, (8, 9)):
        rows = quantize_on_device(x, name, source=source, weights=weights, order=order, late=late)
        return rows.codes, rows.scales
    rows = quantize_rows(x, name, source=source, weights=weights)
    return ordered(rows.codes, order), rows.scales


def ordered(codes: Tensor, order: int) -> Tensor:
    """Return E4M3 codes ``[R, K]`` in ``order``; zeros stand beyond K.

    REORDERED is for four-bit weights: within 128 columns, column 32 t + 8 s + 4 h + i (t, s < 4, h < 2, i < 4) goes to
    place 64 h + 16 s + 4 t + i, so a thread of the tensor core needs 32 neighbours of a row of weights.
    """
    if order == AS_IS:
        return codes
    short = -codes.shape[1] % 128
    padded = functional.pad(codes.view(torch.uint8), (0, short))
    if order == PADDED:
        return padded.view(codes.dtype)
    split = padded.view(codes.shape[0], -1, 4, 4, 2, 4).permute(0, 1, 4, 3, 2, 5)
    return split.reshape(codes.shape[0], -1).view(codes.dtype)
