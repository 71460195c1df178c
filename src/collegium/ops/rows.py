"""Rows of activations before and after quantisation, and how many of them a program takes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from ..runtime.launch import power_at_least
from .checks import require_input

__all__ = [
    "ExpertScales",
    "QuantizedRows",
    "SourceRows",
    "TokenRows",
    "block_of",
    "block_of_token",
    "check_rows",
    "gather_rows",
    "require_scales",
    "transposed_scale_stride",
    "warps_of",
    "whole_rows",
]

_FEW_ROWS = 64  # below, a row is spread over more programs
_MANY_ROWS = 4096  # from here on a program takes as many as make 4096 elements


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedRows:
    """Quantised activations of logical ``shape`` (R, K).

    codes: ``[R, K]`` in the format's dtype; ``nvfp4``: ``[R, ceil(K/2)]`` uint8, low nibble first, the high
        nibble of the last byte 0 when K is odd.
    scales: ``[R, G]`` multipliers of the codes: float32; uint8 E8M0 bytes for ``mxfp8`` and ``fp8_group128_e8m0``;
        float8_e4m3fn for ``nvfp4``; None where the format has none.
    global_scale: ``[R, 1]`` float32 for ``nvfp4``, else None.
    """

    codes: Tensor
    shape: tuple[int, int]
    scales: Tensor | None = None
    global_scale: Tensor | None = None

    def packed_scales(self) -> Tensor:
        """Return E8M0 bytes four in a word, as DeepGEMM takes them on sm_100: ``[R, ceil(G / 4)]`` int32.

        The first group is in the lowest byte, missing groups are 0. Words of one column are next to each
        other, and columns are a multiple of 16 bytes apart, as the tensor memory accelerator needs.
        Raises InputError for scales that are no bytes.
        """
        if self.scales is None or self.scales.dtype != torch.uint8:
            dtype = "none" if self.scales is None else self.scales.dtype
            raise InputError(f"packed scales: found {dtype}, allowed: E8M0 bytes; take mxfp8 or fp8_group128_e8m0")
        rows, groups = self.scales.shape
        words = functional.pad(self.scales, (0, -groups % 4, 0, -rows % 4)).view(torch.int32)
        return words.t().contiguous().t()[:rows]


class ExpertScales(NamedTuple):
    """A static scale for each expert: values ``[E]`` float32; the rows of expert e end at ``offsets[e + 1]`` int64."""

    values: Tensor
    offsets: Tensor

    def by_row(self, rows: int) -> Tensor:
        """Return the scale of each row ``[R]``; rows of no expert get that of the last one."""
        ends, experts = self.offsets[1:], self.values.numel()
        owner = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)
        return self.values[owner.clamp(max=experts - 1)]


class TokenRows(NamedTuple):
    """Tokens ``x [T, K]`` that a kernel reads once each, and the rows of their assignments that it writes.

    slots: ``[T, top-k]`` int64, contiguous, the row of each assignment; negative: none. order, x_ready: as in
    ``SourceRows``.
    """

    x: Tensor
    slots: Tensor
    order: int = 0
    x_ready: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments of every kernel."""
        top_k = self.slots.shape[1]
        return {"TOP_K": top_k, "BLOCK_K": power_at_least(top_k, 2)}


class SourceRows(NamedTuple):
    """Rows that a kernel reads: those of ``x [T, K]``, gathered by ``source`` and times ``weights`` where present.

    order, x_ready: as in ``operand``; for E4M3 codes only. used: ``[1]`` int64, how many rows are read later.
    """

    x: Tensor
    source: Tensor | None
    weights: Tensor | None
    order: int = 0
    x_ready: bool = False
    used: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """R and K."""
        return self.x.shape[0] if self.source is None else self.source.numel(), self.x.shape[1]

    def arguments(self, *written: Tensor) -> tuple[Any, ...]:
        """Return the first arguments of every kernel: inputs, outputs ``written``, and the sizes of the inputs."""
        return self.x, self.source, self.weights, self.used, *written, *self.shape, self.x.stride(0)


def block_of(rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns one program takes; few rows are spread over more programs."""
    few = rows < _FEW_ROWS
    block_c = min(256 if few else 1024, power_at_least(columns, 128))
    if few:
        return 1, block_c
    return 4096 // block_c if rows >= _MANY_ROWS else 2, block_c


def whole_rows(rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns one program takes where a row has one scale."""
    block_c = power_at_least(columns, 32)
    return max(1, 4096 // block_c) if rows >= _MANY_ROWS else 1, block_c


def block_of_token(columns: int, *, whole: bool = False) -> tuple[int, int]:
    """Return the columns of a token that one program takes, all of them if ``whole``, and its warps."""
    block_c = power_at_least(columns, 128)
    block_c = block_c if whole else min(block_c, 4096)
    return block_c, max(1, min(16, block_c // 1024))


def warps_of(elements: int) -> int:
    """Return the warps of a program that takes ``elements`` elements."""
    return max(1, min(16, elements // 512))


def transposed_scale_stride(rows: int) -> int:
    """Return the distance between the scales of two groups in the layout of ``transpose_scales``.

    A tile of up to 256 rows reads that many, from any row on.
    """
    return -(-rows // 16) * 16 + 256


def gather_rows(x: Tensor, source: Tensor | None, weights: Tensor | None) -> Tensor:
    """Return the rows of ``x`` that ``SourceRows`` describes."""
    rows = x if source is None else x.index_select(0, source)
    return rows if weights is None else (rows.float() * weights[:, None]).to(x.dtype)


def check_rows(name: str, x: Tensor) -> None:
    """Raise InputError unless ``x`` is rows of floating numbers."""
    valid = x.dim() == 2 and x.shape[1] >= 1 and x.is_floating_point()
    require_input(valid, f"quantize to {name}", x, "floating [R, K >= 1]")


def require_scales(name: str, scales: Tensor | None) -> Tensor:
    """Return ``scales``; raises InputError for None."""
    if scales is None:
        raise InputError(f"dequantize from {name}: found no scale, allowed: rows quantised to {name}")
    return scales
