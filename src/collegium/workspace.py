"""Memory that forward passes run in: taken once, cut into named buffers for each batch size.

A forward pass allocates nothing because its buffers are views of one block that exist already. Layers of a device
share the block: they run one after the other. Blocks are never given back while the workspace lives, since a
captured CUDA graph keeps their addresses.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

__all__ = ["Wanted", "Workspace", "bytes_of", "shared_workspace"]

Wanted = tuple[tuple[int, ...], torch.dtype]

_ALIGN = 256
_KEPT = 256  # cuts remembered; the oldest goes first

_shared: dict[torch.device, Workspace] = {}


def shared_workspace(device: torch.device) -> Workspace:
    """Return the workspace all layers of ``device`` share unless they are given another."""
    return _shared.setdefault(device, Workspace(device))


def bytes_of(wanted: Sequence[Wanted]) -> int:
    """Return the bytes a cut of ``wanted`` takes, alignment included."""
    return sum(_padded(shape, dtype) for shape, dtype in wanted)


class Workspace:
    """Buffers on one device for one forward pass at a time.

    Two passes that run at the same time, on two streams or in two captured graphs replayed side by side, need two
    workspaces.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[Tensor] = []
        self._cuts: dict[Hashable, tuple[Tensor, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the block in use; older, smaller blocks are not counted."""
        return self._blocks[-1].numel() if self._blocks else 0

    def reserve(self, size: int) -> None:
        """Make sure that cuts of up to ``size`` bytes need no new memory."""
        if size > self.nbytes:
            self._blocks.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            self._cuts.clear()

    def cut(self, key: Hashable, wanted: Sequence[Wanted], *, start: int = 0) -> tuple[Tensor, ...]:
        """Return one tensor for each shape and dtype, contiguous and uninitialised, the same for the same key.

        The tensors of one call do not overlap; those of different keys do, unless ``start`` (bytes from the
        beginning of the block) keeps them apart. Takes memory only when the block is too small.
        """
        found = self._cuts.get(key)
        if found is not None:
            return found
        self.reserve(start + bytes_of(wanted))
        made: list[Tensor] = []
        for shape, dtype in wanted:
            used = prod(shape) * dtype.itemsize
            made.append(self._blocks[-1][start : start + used].view(dtype).view(shape))
            start += _padded(shape, dtype)
        if len(self._cuts) >= _KEPT:
            del self._cuts[next(iter(self._cuts))]
        self._cuts[key] = tuple(made)
        return self._cuts[key]


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
