"""What all packings share. Shape letters: E experts, P parts, N output rows, K input columns, B K blocks, G groups."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....errors import InputError

__all__ = ["Unpacked", "add_projection_dim", "empty_weight", "from_scale_words", "row_batches", "to_scale_words"]

# Codes packed at a time: few enough for the caches of a CPU; on a GPU 11 bytes each stay below 64 MiB.
_CPU_BATCH = 1 << 20
_GPU_BATCH = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpacked:
    """A packed matrix in logical order.

    A weight is ``(number - zero) * scale - minimum``, times the scale of its row; ``number`` is what its code means.
    codes: ``[E, P, N, K]``, codes or floating numbers. scales: float64 ``[E, P, N, G]``, each for ``group`` columns, or
    None. zeros, minima: like scales, or None. row_scale: float64 ``[E, P, N]`` or None. numbers: float64
    ``[E, P, 16]``, a table stored with the weights, or None.
    """

    codes: Tensor
    scales: Tensor | None = None
    group: int = 0
    zeros: Tensor | None = None
    minima: Tensor | None = None
    row_scale: Tensor | None = None
    numbers: Tensor | None = None

    def weights(self, numbers: Tensor | None = None) -> Tensor:
        """Return the float64 weights ``[E, P, N, K]``; numbers: of each code, where no table is stored."""
        if self.numbers is not None:
            table = self.numbers.unsqueeze(2).expand(*self.codes.shape[:3], -1)
            weights = table.gather(-1, self.codes.long())
        else:
            weights = self.codes.double() if numbers is None else numbers.double()[self.codes.long()]
        if self.zeros is not None:
            weights = weights - self._by_column(self.zeros)
        if self.scales is not None:
            weights = weights * self._by_column(self.scales)
        if self.minima is not None:
            weights = weights - self._by_column(self.minima)
        return weights if self.row_scale is None else weights * self.row_scale.unsqueeze(-1)

    def _by_column(self, groups: Tensor) -> Tensor:
        return groups.double().repeat_interleave(self.group, dim=-1)[..., : self.codes.shape[-1]]


def row_batches(experts: int, rows: int, row_codes: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield the experts and rows to pack at a time: all rows of some experts, or some rows of one.

    row_codes: codes of a row, of all parts. Bounds the temporary memory, some tens of bytes a code.
    """
    batch = max(1, (_CPU_BATCH if device.type == "cpu" else _GPU_BATCH) // row_codes)
    expert_step = max(1, batch // rows)
    row_step = min(batch, rows)
    for expert in range(0, experts, expert_step):
        for row in range(0, rows, row_step):
            yield slice(expert, min(expert + expert_step, experts)), slice(row, min(row + row_step, rows))


def add_projection_dim(payload: Any) -> Any:
    """Return a payload ``[E, N, K]`` as ``[E, 1, N, K]`` without copying."""
    experts, *matrix = payload.shape
    tensors = {name: tensor.unsqueeze(1) for name, tensor in payload.tensors().items()}
    return replace(payload, shape=(experts, 1, *matrix), **tensors)


def to_scale_words(scales: Tensor, blocks: int) -> Tensor:
    """Return scale bytes ``[E, P, N, G]`` as int32 ``[E, P, B, 1, N]``, the four of a K block in a word."""
    experts, parts, n_out, groups = scales.shape
    words = torch.empty((experts, parts, blocks, 1, n_out), dtype=torch.int32, device=scales.device)
    for expert in range(experts):
        padded = functional.pad(scales[expert], (0, 4 * blocks - groups))
        words[expert, :, :, 0] = padded.contiguous().view(torch.int32).transpose(-1, -2)
    return words


def from_scale_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 32-bit words ``[E, P, B, words, N]`` as numbers of ``dtype``, ``[E, P, N, B * numbers of a block]``."""
    by_row = words.permute(0, 1, 4, 2, 3).contiguous()
    return by_row.view(torch.int32).view(dtype).flatten(3)


def empty_weight(shape: tuple[int, ...]) -> InputError:
    """Return the error for a weight without rows or columns."""
    return InputError(f"packing: a weight of shape {shape} is empty, allowed: at least one row and column")
