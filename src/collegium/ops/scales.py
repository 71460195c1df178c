"""Float32 arithmetic that formats of activations share: groups of columns, and scales that are powers of two.

Shape letters: R rows, K columns, G groups of columns in a row.
"""

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["e2m1_values", "grouped", "power", "power_byte", "quotient", "spread"]


def grouped(x: Tensor, group: int) -> Tensor:
    """Zero-pad ``x [R, K]`` to ``[R, G, group]``; group 0 is the whole row."""
    columns = x.shape[1]
    size = group or columns
    return functional.pad(x, (0, -columns % size)).reshape(x.shape[0], -(-columns // size), size)


def spread(scales: Tensor, group: int, columns: int) -> Tensor:
    """Repeat ``[R, G]`` over the columns of each group, ``[R, K]``."""
    return scales.repeat_interleave(group, dim=1)[:, :columns] if group else scales


def quotient(x: Tensor, divisor: float) -> Tensor:
    """Return ``x / divisor`` rounded once."""
    # On CUDA torch turns division by a Python number into multiplication by its reciprocal: two roundings.
    return x / torch.full_like(x, divisor)


def power_byte(amax: Tensor) -> Tensor:
    """Return the biased exponent (int32) of the least power of two not below ``amax / 448`` or the floor."""
    bits = amax.contiguous().view(torch.int32)
    # 448 is 1.75 * 2^8: the quotient's exponent drops by 8, and rises by one when the mantissa is above 1.75.
    above = (bits & 0x7FFFFF) > 0x600000
    return ((bits >> 23) - 8 + above.to(torch.int32)).clamp(min=1)


def power(byte: Tensor) -> Tensor:
    """Return 2^(byte - 127) float32 for int32 bytes 0 to 254."""
    # Byte 0 is the subnormal 2^-127, whose bits are not an exponent field; no quantiser here writes it.
    return torch.where(byte == 0, 1 << 22, byte << 23).to(torch.int32).view(torch.float32)


def e2m1_values(codes: Tensor) -> Tensor:
    """Return the float32 values of E2M1 codes 0..15."""
    low = (codes & 7).to(torch.int32)
    # Exponent 0 is subnormal: 0 and 0.5. Otherwise (1 + mantissa / 2) * 2^(exponent - 1), built from its
    # bits.
    normal = (((low >> 1) + 126) << 23) | ((low & 1) << 22)
    size = torch.where(low < 2, low.to(torch.float32) * 0.5, normal.view(torch.float32))
    return torch.where(codes >= 8, -size, size)
