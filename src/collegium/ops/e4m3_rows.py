"""Rows of activations as operands of a grouped product: themselves, or E4M3 codes with float32 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .quantize import activation_format

if TYPE_CHECKING:
    from torch import Tensor

    from .quantize import ActivationFormat

__all__ = ["AS_IS", "PADDED", "REORDERED", "operand", "ordered"]

# How a product reads the codes of a row: K of them; up to whole 128; the same in the order of ``ordered``.
AS_IS, PADDED, REORDERED = range(3)


def operand(x: Tensor, name: str | None, *, order: int = AS_IS) -> tuple[Tensor, Tensor | None]:
    """Return ``x`` as a product reads it, E4M3 codes and float32 scales in the format ``name`` or itself and None.

    order: one of the three above.
    """
    if name is None:
        return x if x.stride(-1) == 1 else x.contiguous(), None
    form = activation_format(name)
    if not x.is_cuda:
        rows = form.quantize(x)
        return ordered(rows.codes, order), rows.scales
    return _e4m3_rows(x if x.stride(-1) == 1 else x.contiguous(), form, order)


def ordered(codes: Tensor, order: int) -> Tensor:
    """Return codes ``[R, K]`` in ``order``; zeros stand beyond K.

    REORDERED is for four-bit weights: within 128 columns, column 32 t + 8 s + 4 h + i (t, s < 4, h < 2, i < 4) goes to
    place 64 h + 16 s + 4 t + i, so a thread of the tensor core needs 32 neighbours of a row of weights.
    """
    if order == AS_IS:
        return codes
    short = -codes.shape[1] % 128
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, short))
    if order == PADDED:
        return padded.view(codes.dtype)
    split = padded.view(codes.shape[0], -1, 4, 4, 2, 4).permute(0, 1, 4, 3, 2, 5)
    return split.reshape(codes.shape[0], -1).view(codes.dtype)


def _e4m3_rows(x: Tensor, form: ActivationFormat, order: int) -> tuple[Tensor, Tensor]:
    """Return what ``form.quantize(x)`` holds, in one pass instead of ten."""
    from ..kernels.e4m3_rows import e4m3_rows_kernel

    count, columns = x.shape
    group = form.group or columns
    groups = -(-columns // group)
    wide = -(-columns // 128) * 128 if order else columns
    codes = torch.empty(count, wide, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(count, groups, dtype=torch.float32, device=x.device)
    block_r = 16 if form.group else 1
    launch: Any = e4m3_rows_kernel
    launch[(-(-count // block_r), groups)](
        x,
        codes,
        scales,
        count,
        columns,
        x.stride(0),
        groups,
        wide,
        GROUP=max(128 if order else 1, 1 << (group - 1).bit_length()),
        BLOCK_R=block_r,
        POWER=form.name == "fp8_group128_pow2",
        ORDER=order,
        num_warps=4,
    )
    return codes, scales
