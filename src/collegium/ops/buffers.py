"""Tables of what an operation writes: what it takes of a pass's memory and what it declares come from one place."""

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
    """Take ``buffers`` from ``memory``, or as fresh memory of ``device`` where it is None."""
    return {name: alloc(memory, name, shape, dtype, device) for name, (shape, dtype) in buffers.items()}
