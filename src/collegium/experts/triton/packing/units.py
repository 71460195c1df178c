"""Scales that are units of a sum: integers, whose sum is kept in units of the last group's scale."""

import torch
from torch import Tensor

__all__ = ["flush_codes", "flush_scales"]

_MIN_UNIT = 2.0**-80


def flush_scales(scales: Tensor) -> Tensor:
    """Return scales, 1 for those up to 2^-80, which are no unit for a sum; ``flush_codes`` clears their codes."""
    return torch.where(scales.abs() <= _MIN_UNIT, 1.0, scales)


def flush_codes(codes: Tensor, scales: Tensor, group: int, zero: Tensor | int) -> Tensor:
    """Return codes ``[..., K]``, with ``zero`` in groups of columns whose scale of ``[..., G]`` is no unit."""
    flushed = scales.abs() <= _MIN_UNIT
    if not bool(flushed.any()):
        return codes
    zeros = torch.as_tensor(zero, device=codes.device).to(codes.dtype).expand_as(flushed)
    columns = codes.shape[-1]
    flushed = flushed.repeat_interleave(group, dim=-1)[..., :columns]
    zeros = zeros.repeat_interleave(group, dim=-1)[..., :columns]
    return torch.where(flushed, zeros, codes)
