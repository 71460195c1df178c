"""Memory of passes for tests: one that poisons what it hands out, one that notes what is taken."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Noted", "Poisoned"]


class Poisoned:
    """Fresh memory of ``device`` where floats are NaN and integers no index; ``taken`` holds what was handed out."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.taken: dict[str, Tensor] = {}

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return poisoned memory, and refuse a name that was taken before."""
        assert name not in self.taken, name
        made = torch.empty(shape, dtype=dtype, device=self.device)
        if dtype.is_floating_point and dtype.itemsize == 1:
            made.view(torch.uint8).fill_(0x7F)
        else:
            made.fill_(torch.nan if dtype.is_floating_point else 0xAB if dtype == torch.uint8 else -77777)
        self.taken[name] = made
        return made

    def part(self, name: str) -> Poisoned:
        """Return memory with names of its own."""
        return Poisoned(self.device)


class Noted:
    """Memory of the CPU; ``sizes`` holds the bytes taken under each name, those of parts as ``part/name``."""

    def __init__(self, sizes: dict[str, int] | None = None, prefix: str = "") -> None:
        self.sizes: dict[str, int] = {} if sizes is None else sizes
        self._prefix = prefix

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return fresh memory, and refuse a name that was taken before."""
        name = self._prefix + name
        assert name not in self.sizes, name
        self.sizes[name] = prod(shape) * dtype.itemsize
        return torch.empty(shape, dtype=dtype)

    def part(self, name: str) -> Noted:
        """Return memory whose names begin with ``name/``."""
        return Noted(self.sizes, f"{self._prefix}{name}/")
