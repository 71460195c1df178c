"""Tables of the buffers of an operation: its allocations and the regions it declares come from one place."""

from math import prod

import torch
from torch import Tensor

from ..runtime.memory import Memory, Regions, alloc

__all__ = ["Buffers", "allocate", "sizes"]

Buffers = dict[str, "tuple[tuple[int, ...], torch.dtype]"]  # shape and dtype under each name


def sizes(buffers: Buffers) -> Regions:
    """Return the bytes of each of ``buffers``."""
    return {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in buffers.items()}


def allocate(memory: Memory | None, buffers: Buffers, device: torch.device) -> dict[str, Tensor]:
    """Return ``buffers`` from ``memory``, or fresh ones on ``device`` where it is None."""
    return {name: alloc(memory, name, shape, dtype, device) for name, (shape, dtype) in buffers.items()}
