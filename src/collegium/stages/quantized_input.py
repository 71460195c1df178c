"""Tokens that arrive as E4M3 codes with scales, checked against the activation format of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.quantize import QuantizedRows, activation_format
from ..runtime.packed_module import check_tensors

if TYPE_CHECKING:
    from ..ops.quantize import ActivationFormat

__all__ = ["code_scales", "dequantized"]


def code_scales(caller: str, format_name: str, codes: Tensor, scale: Tensor, *, columns: int | None = None) -> Tensor:
    """Return the scales of ``codes [..., H]`` float8_e4m3fn as float32 rows ``[..., G]``, for the kernels.

    columns: those that the scales are for, where that is another width than that of the codes.

    format_name: of the plan's activations, E4M3 codes with a scale per row or per group of columns. scale: one number,
    or one per row ``[...]`` or ``[..., 1]``, or one per group ``[..., G]``; of codes ``[E, M, H]`` also one per expert,
    ``[E, 1, 1]``. caller: for errors. Raises InputError for another dtype, and for scales that the format does not
    have.
    """
    form = activation_format(format_name)
    check_tensors(codes.device, scale=scale)
    if not form.e4m3:
        raise InputError(
            f"{caller}: x is {codes.dtype} with scales, the layer was planned for {format_name} activations; plan with "
            "activation_format='fp8_token' (one scale per token), 'fp8_group128' or 'fp8_static', or pass tokens"
        )
    rows = tuple(codes.shape[:-1])
    groups = -(-(columns or codes.shape[-1]) // form.group) if form.group else 1
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu):
        raise InputError(f"{caller}: the scales are {scale.dtype}; allowed: float32, bfloat16, float16, float8_e8m0fnu")
    shape = tuple(scale.shape)
    if shape == rows and groups == 1:
        scale = scale.unsqueeze(-1)
    elif scale.numel() == 1 and groups == 1:
        scale = scale.reshape((1,) * (len(rows) + 1)).expand(*rows, 1)
    elif groups == 1 and len(rows) == 2 and shape == (rows[0], 1, 1):
        scale = scale.expand(*rows, 1)
    elif shape != (*rows, groups):
        raise InputError(f"{caller}: the scales are {shape}; {_allowed(form, rows, groups)}")
    return scale.float().contiguous()


def dequantized(format_name: str, codes: Tensor, scale: Tensor) -> Tensor:
    """Return the tokens ``[T, H]`` float32 of ``codes [T, H]`` with scales ``[T, G]`` from ``code_scales``."""
    rows = QuantizedRows(codes=codes, shape=(codes.shape[0], codes.shape[1]), scales=scale)
    return activation_format(format_name).dequantize(rows)


def _allowed(form: ActivationFormat, rows: tuple[int, ...], groups: int) -> str:
    if groups == 1:
        each = f", {(rows[0], 1, 1)}" if len(rows) == 2 else ""
        return f"with {form.name} activations allowed: one number{each}, {rows} or {(*rows, 1)}"
    return f"with {form.name} activations allowed: {(*rows, groups)}, one for every {form.group} columns"
