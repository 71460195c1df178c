"""Rows of activations before and after a format's kernel, and how many of them a program takes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from ..runtime.launch import overlaps, power_at_least
from .checks import require_input

__all__ = [
    "QuantizedRows",
    "SourceRows",
    "block_of",
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

        The first group is in the lowest byte, groups that are missing are 0. Words of one column are next to each
        other, and columns are a multiple of 16 bytes apart, which the tensor memory accelerator asks for.
        Raises InputError for scales that are no bytes.
        """
        if self.scales is None or self.scales.dtype != torch.uint8:
            dtype = "none" if self.scales is None else self.scales.dtype
            raise InputError(f"packed scales: found {dtype}, allowed: E8M0 bytes; take mxfp8 or fp8_group128_e8m0")
        rows, groups = self.scales.shape
        words = functional.pad(self.scales, (0, -groups % 4, 0, -rows % 4)).view(torch.int32)
        return words.t().contiguous().t()[:rows]


class SourceRows(NamedTuple):
    """Rows that a kernel reads: those of ``x [T, K]``, through ``source`` and times ``weights`` where given.

    order, x_ready: as ``operand`` says; for E4M3 codes alone. used: ``[1]`` int64, the first rows that anybody reads.
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
        """Return the first arguments of every kernel: what it reads, what it writes, and the sizes of what it reads."""
        spare = written[0]
        given = (self.source, self.weights, self.used)
        return self.x, *(spare if each is None else each for each in given), *written, *self.shape, self.x.stride(0)

    def constants(self) -> dict[str, bool]:
        """Return the compile-time arguments that say what a kernel reads."""
        given = {"GATHER": self.source, "WEIGHTS": self.weights, "SOME": self.used}
        return {name: each is not None for name, each in given.items()} | {"PDL": overlaps(self.x)}


def block_of(rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns one program takes; few rows are spread over more programs."""
    few = rows < _FEW_ROWS
    block_c = min(256 if few else 1024, power_at_least(columns, 128))
    return 1 if few else 4096 // block_c if rows >= _MANY_ROWS else 2, block_c


def whole_rows(rows: int, columns: int) -> tuple[int, int]:
    """Return what ``block_of`` does where one scale belongs to a row."""
    block_c = power_at_least(columns, 32)
    return max(1, 4096 // block_c) if rows >= _MANY_ROWS else 1, block_c


def warps_of(elements: int) -> int:
    """Return the warps of a program that takes so many elements."""
    return max(1, min(16, elements // 512))


def transposed_scale_stride(rows: int) -> int:
    """Return how far the scales of a group of columns are from those of the next where ``across`` lays them out.

    A tile of up to 256 rows reads that many of any row on.
    """
    return -(-rows // 16) * 16 + 256


def gather_rows(x: Tensor, source: Tensor | None, weights: Tensor | None) -> Tensor:
    """Return the rows of ``x`` that ``GivenRows`` names."""
    rows = x if source is None else x.index_select(0, source)
    return rows if weights is None else (rows.float() * weights[:, None]).to(x.dtype)


def check_rows(name: str, x: Tensor) -> None:
    """Raise InputError for what is no rows of numbers."""
    fits = x.dim() == 2 and x.shape[1] >= 1 and x.is_floating_point()
    require_input(fits, f"quantize to {name}", x, "floating [R, K >= 1]")


def require_scales(name: str, scales: Tensor | None) -> Tensor:
    """Return scales that are there; raises InputError where there are none."""
    if scales is None:
        raise InputError(f"dequantize from {name}: found no scale, allowed: rows quantised to {name}")
    return scales
