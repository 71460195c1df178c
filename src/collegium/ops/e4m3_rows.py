"""Rows of activations as operands of a grouped product: themselves, or E4M3 codes with float32 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .quantize import activation_format

if TYPE_CHECKING:
    from torch import Tensor

    from .quantize import ActivationFormat

__all__ = ["operand"]


def operand(x: Tensor, name: str | None) -> tuple[Tensor, Tensor | None]:
    """Return ``x`` as a product reads it, E4M3 codes and float32 scales in the format ``name`` or itself and None."""
    if name is None:
        return x if x.stride(-1) == 1 else x.contiguous(), None
    form = activation_format(name)
    if not x.is_cuda:
        rows = form.quantize(x)
        return rows.codes, rows.scales
    return _e4m3_rows(x if x.stride(-1) == 1 else x.contiguous(), form)


def _e4m3_rows(x: Tensor, form: ActivationFormat) -> tuple[Tensor, Tensor]:
    """Return what ``form.quantize(x)`` holds, in one pass instead of ten."""
    from ..kernels.e4m3_rows import e4m3_rows_kernel

    count, columns = x.shape
    group = form.group or columns
    groups = -(-columns // group)
    codes = torch.empty(count, columns, dtype=torch.float8_e4m3fn, device=x.device)
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
        GROUP=1 << (group - 1).bit_length(),
        BLOCK_R=block_r,
        POWER=form.name == "fp8_group128_pow2",
        num_warps=4,
    )
    return codes, scales
