"""Rows of activations as operands of a grouped product: themselves, or codes and scales in the product's order."""

from dataclasses import replace

import torch
from torch import Tensor

from ..runtime.memory import Memory, Regions, part
from .quantize import AS_IS, ActivationFormat, activation_format, cast_name, quantize_regions, quantize_rows

__all__ = ["Operand", "operand", "operand_regions", "transpose_scales"]

Operand = tuple[Tensor, Tensor | None]  # rows as a product reads them, and the scales of codes


def operand_regions(
    rows: int,
    columns: int,
    name: str | ActivationFormat | None,
    *,
    order: int = AS_IS,
    gathered: bool = False,
    dtype: torch.dtype,
) -> Regions:
    """Return the most bytes ``operand`` takes for any count of rows up to ``rows``, of ``columns`` each.

    name, order: as in ``operand``. gathered: whether source or weights are passed. dtype: of x.
    """
    if name is None:
        if not gathered:
            return {}
        name = cast_name(dtype)
    return quantize_regions(rows, columns, name, order=order)


def operand(
    x: Tensor,
    name: str | ActivationFormat | None,
    *,
    source: Tensor | None = None,
    weights: Tensor | None = None,
    order: int = AS_IS,
    x_ready: bool = False,
    used: Tensor | None = None,
    memory: Memory | None = None,
) -> Operand:
    """Return rows of ``x [T, K]`` as a product reads them: codes and scales of a format, or x's dtype and None.

    source and weights as in ``quantize_rows``; without them and without a format x itself is returned. order: of
    E4M3 codes, one of AS_IS, PADDED and REORDERED. x_ready: nothing launched since x was written touches x or the
    buffers that memory hands out next, so a kernel that reads only x may overlap the previous kernel. used: ``[1]``
    int64, how many rows are read later; a kernel writes no others. memory: where the kernel takes "codes", "scales" and
    "global_scale".
    Raises ``InputError`` for wrong shapes or dtypes, and for an order that rows of the format cannot have.
    """
    if name is None:
        if source is None and weights is None and order == AS_IS:
            return x if x.stride(-1) == 1 else x.contiguous(), None
        name = cast_name(x.dtype)
    # Fresh memory may still be in use by the previous kernel.
    ready = x_ready and memory is not None and used is None
    rows = quantize_rows(x, name, source=source, weights=weights, order=order, x_ready=ready, used=used, memory=memory)
    return rows.codes, rows.scales


def transpose_scales(
    scale: Tensor, source: Tensor | None, used: Tensor | None = None, memory: Memory | None = None
) -> Tensor:
    """Return scales ``[R, G]`` of rows ``source [R]`` of ``[T, G]`` float32, those of a group adjacent in memory.

    A tile of a product then loads the scales of neighbouring rows at once. used, memory: as in ``operand``.
    """
    form = replace(activation_format("fp32"), transposed_scales=True)
    return quantize_rows(scale, form, source=source, used=used, memory=part(memory, "across")).codes
