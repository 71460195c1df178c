"""Where the small kernels run: on a CUDA device that Triton compiles for."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["on_device", "power_of_two"]


def on_device(x: Tensor, capability: tuple[int, int] = (8, 0)) -> bool:
    """Return whether a Triton kernel for ``capability`` and later can serve ``x``; otherwise torch does."""
    return x.is_cuda and _capability(x.device) >= capability


def power_of_two(count: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least ``count`` and ``least``."""
    return max(least, 1 << max(0, count - 1).bit_length())


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if find_spec("triton") is not None else (0, 0)
