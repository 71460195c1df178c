"""Float32 arithmetic that activation formats share: scales, and numbers from codes.

Shape letters: R rows, K columns, G groups of columns in a row.
"""

import torch
from torch import Tensor

from ..formats.codecs import e2m1_pairs, e8m0_values, look_up, power_of_two

__all__ = ["e2m1_numbers", "e8m0_numbers", "power", "quotient", "spread"]


def spread(scales: Tensor, group: int, columns: int) -> Tensor:
    """Repeat ``[R, G]`` over the columns of each group, ``[R, K]``."""
    return scales.repeat_interleave(group, dim=1)[:, :columns] if group else scales


def quotient(x: Tensor, divisor: float) -> Tensor:
    """Return ``x / divisor`` rounded once."""
    # On CUDA torch turns division by a Python number into multiplication by its reciprocal: two roundings.
    return x / torch.full_like(x, divisor)


def power(amax: Tensor) -> Tensor:
    """Return the least power of two not below ``amax / 448`` or the floor."""
    bits = amax.contiguous().view(torch.int32)
    # 448 is 1.75 * 2^8: the quotient's exponent drops by 8, and rises by one when the mantissa is above 1.75.
    above = (bits & 0x7FFFFF) > 0x600000
    return power_of_two(((bits >> 23) - (127 + 8) + above.to(torch.int32)).clamp(min=-126))


def e8m0_numbers(scales: Tensor) -> Tensor:
    """Return the float32 values of E8M0 bytes."""
    return look_up(e8m0_values(scales.device), scales)


def e2m1_numbers(codes: Tensor) -> Tensor:
    """Return the float32 values ``[R, 2n]`` of E2M1 codes, two in each byte of ``[R, n]``."""
    return look_up(e2m1_pairs(codes.device), codes).view(torch.float32)
