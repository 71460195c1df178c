"""Rows of activations as operands of a grouped product: themselves, or E4M3 codes with float32 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .quantize import activation_format

if TYPE_CHECKING:
    from torch import Tensor

    from .quantize import ActivationFormat

__all__ = ["operand", "reordered"]


def operand(x: Tensor, name: str | None, *, reorder: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return ``x`` as a product reads it, E4M3 codes and float32 scales in the format ``name`` or itself and None.

    reorder: the codes' columns stand as ``reordered`` says.
    """
    if name is None:
        return x if x.stride(-1) == 1 else x.contiguous(), None
    form = activation_format(name)
    if not x.is_cuda:
        rows = form.quantize(x)
        return reordered(rows.codes) if reorder else rows.codes, rows.scales
    return _e4m3_rows(x if x.stride(-1) == 1 else x.contiguous(), form, reorder)


def reordered(codes: Tensor) -> Tensor:
    """Return codes ``[R, K]`` as ``[R, K up to whole 128]``, zeros beyond K, columns in the four-bit kernel's order.

    Within 128 columns, column 32 t + 8 s + 4 h + i (t, s < 4, h < 2, i < 4) goes to place 64 h + 16 s + 4 t + i: a
    thread of the tensor core then needs 32 neighbours of a row of weights.
    """
    short = -codes.shape[1] % 128
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, short))
    split = padded.view(codes.shape[0], -1, 4, 4, 2, 4).permute(0, 1, 4, 3, 2, 5)
    return split.reshape(codes.shape[0], -1).view(codes.dtype)


def _e4m3_rows(x: Tensor, form: ActivationFormat, reorder: bool) -> tuple[Tensor, Tensor]:
    """Return what ``form.quantize(x)`` holds, in one pass instead of ten."""
    from ..kernels.e4m3_rows import e4m3_rows_kernel

    count, columns = x.shape
    group = form.group or columns
    groups = -(-columns // group)
    wide = -(-columns // 128) * 128 if reorder else columns
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
        GROUP=max(128 if reorder else 1, 1 << (group - 1).bit_length()),
        BLOCK_R=block_r,
        POWER=form.name == "fp8_group128_pow2",
        REORDER=reorder,
        num_warps=4,
    )
    return codes, scales
