"""Unquantised weights, used as they are; bfloat16 for float16 rows as float16 over a power of two for each row."""

from dataclasses import replace

import torch
from torch import Tensor

from ....formats.codecs import power_of_two
from ....formats.unquantised import Bf16, Fp16, Fp32
from ..layout import ROWS, float_rows
from ..matrix import PackedMatrix
from .common import Unpacked

__all__ = ["pack_float32", "pack_plain", "unpack_plain"]


def pack_plain(payload: Bf16 | Fp16, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Take values ``[E, P, N, K]`` as they are (copied only if not contiguous).

    half: tokens are float16. Bfloat16 weights become float16 over a power of two for each row, which is applied after
    the sum: numbers below 2^-32 of their row's largest are rounded, nothing else. With float16 weights and bfloat16
    tokens, the tokens are converted instead.
    """
    layout = ROWS["plain"].of(payload.shape)
    values = payload.values
    row_scale = None
    if isinstance(payload, Fp16):
        layout = replace(layout, halved=not half)
    elif half:
        values, row_scale = _to_half(values)
    return PackedMatrix(layout=layout, values=values.contiguous(), row_scale=row_scale, bias=bias)


def pack_float32(payload: Bf16 | Fp16 | Fp32, bias: Tensor | None) -> PackedMatrix:
    """Take values ``[E, P, N, K]`` of any dtype as they are, for float32 rows; kernels convert them in registers."""
    values = payload.values
    layout = float_rows(values.dtype).of(payload.shape)
    return PackedMatrix(layout=layout, values=values.contiguous(), bias=bias)


def _to_half(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return float16 values and the float32 power of two of each row."""
    values = weights.new_empty(weights.shape, dtype=torch.float16)
    row_scale = weights.new_empty(weights.shape[:3], dtype=torch.float32)
    for expert, rows, scale in zip(weights, values, row_scale, strict=True):
        # The largest of a row comes to lie between 2^14 and 2^15.
        power = (torch.frexp(expert.abs().amax(-1).float()).exponent - 15).clamp(-126, 113)
        rows.copy_(expert.float() * power_of_two(-power).unsqueeze(-1))
        scale.copy_(power_of_two(power))
    return values, row_scale


def unpack_plain(packed: PackedMatrix) -> Unpacked:
    """Return the numbers and, for float16 made of bfloat16, the factor of each row."""
    row_scale = None if packed.row_scale is None else packed.row_scale.double()
    return Unpacked(codes=packed.values, row_scale=row_scale)
