"""How one matrix of all experts is laid out for a kernel: a type for each format, and sizes; no tensors.

A layout follows from the sizes of a layer and the names of its formats, so tiles can be chosen before any weight is
there. A layout with its tensors is a ``PackedMatrix`` (``matrix.py``).

Shape letters: E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs, B K blocks, R row tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from ...kernels import numbers
from ...ops.quantize import AS_IS, PADDED, REORDERED
from .tile_choice import TileProblem

__all__ = [
    "BlockCodes",
    "BlockLanes",
    "Int4FloatLanes",
    "Int4FloatWords",
    "Int4Lanes",
    "Int4PairLanes",
    "Int4PairWords",
    "Int4Words",
    "Int8FloatLanes",
    "Int8Lanes",
    "Lanes",
    "Layout",
    "MxFp4Lanes",
    "MxFp4Pairs",
    "MxFp4Words",
    "MxFp8Lanes",
    "NvFp4Lanes",
    "NvFp4Words",
    "Plain",
    "RowCodes",
    "RowLanes",
    "Shape",
    "Words",
]

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One matrix ``shape``, (E, P, N, K), as a kernel reads it.

    Class facts. weight, scale_kind: the kernel's numbers (``kernels/numbers.py``). operand: dtype of the rows that
    these weights multiply. stored: dtype of values. block_k: columns of a step of the K loop. scale_block: rows that
    share a scale, where it belongs to a block. words: 32-bit words of scales for a row and K block. bits: stored bits
    of a weight, scales included. scaled_rows: rows of x have scales. row_order: of their codes (``ops/operand.py``).
    decoded, promoted, quartered, operands: see ``TileProblem``.

    half: rows are float16 instead of operand. zeroed: scales hold zero points (``numbers.ZERO_SCALE``).
    """

    shape: Shape
    half: bool = False
    zeroed: bool = False

    weight: ClassVar[int]
    operand: ClassVar[torch.dtype]
    stored: ClassVar[torch.dtype]
    bits: ClassVar[float]
    block_k: ClassVar[int] = 128
    scale_kind: ClassVar[int] = numbers.NO_SCALE
    scale_block: ClassVar[int] = 1
    words: ClassVar[int] = 1
    scaled_rows: ClassVar[bool] = False
    row_order: ClassVar[int] = AS_IS
    decoded: ClassVar[bool] = True
    promoted: ClassVar[bool] = False
    quartered: ClassVar[bool] = False
    operands: ClassVar[int] = 1

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of rows."""
        return torch.float16 if self.half else self.operand

    @property
    def scaling(self) -> int:
        """The kernel's number of what scales are and hold."""
        return numbers.ZERO_SCALE if self.zeroed else self.scale_kind

    @property
    def k_blocks(self) -> int:
        """B, steps of the K loop."""
        return -(-self.shape[3] // self.block_k)

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of values."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of values."""
        return prod(self.values_shape) * self.stored.itemsize

    @property
    def steps(self) -> tuple[int, int, int]:
        """Elements of values from one row, K block and part to the next."""
        raise NotImplementedError

    @property
    def x_columns(self) -> int:
        """Columns of x: rows in an order of their own have whole K blocks."""
        return self.shape[3] if self.row_order == AS_IS else self.k_blocks * self.block_k

    @property
    def scale_rows(self) -> int:
        """Rows of scales of a part where a scale covers a block of weights, otherwise 1."""
        return -(-self.shape[2] // self.scale_block) if self.scale_block > 1 else 1

    @property
    def operand_rows(self) -> tuple[int, int]:
        """How many operands the weights of an expert are, and rows of each."""
        return self.shape[1], self.shape[2]

    def problem(self, rows: int, x_bits: int, x_groups: bool) -> TileProblem:
        """Return what tile choice asks about a product of ``rows`` rows with these weights.

        x_bits: bits of an activation. x_groups: every 128 activations of a row have a scale of their own.
        """
        parts, n_out = self.operand_rows
        return TileProblem(
            rows=rows,
            experts=self.shape[0],
            n_out=n_out,
            k_in=self.shape[3],
            parts=parts,
            block_k=self.block_k,
            weight_bits=self.bits,
            x_bits=x_bits,
            decoded=self.decoded,
            promoted=x_groups or self.promoted,
            quartered=self.quartered,
            operands=self.operands,
        )


class _Rows(Layout):
    """values ``[E, P, N, K]`` as published: the operands themselves."""

    decoded = False

    @property
    def values_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def steps(self) -> tuple[int, int, int]:
        _, _, n_out, k_in = self.shape
        return k_in, self.block_k, n_out * k_in


class Plain(_Rows):
    """16-bit weights in the dtype of the rows."""

    weight = numbers.PLAIN
    operand = stored = torch.bfloat16
    block_k = 64
    bits = 16


class RowCodes(_Rows):
    """E4M3 codes for E4M3 rows; scales belong to whole rows: row_scale float32 ``[E, P, N]``."""

    weight = numbers.E4M3_E4M3
    operand = stored = torch.float8_e4m3fn
    bits = 8
    scaled_rows = True


class BlockCodes(RowCodes):
    """E4M3 codes for E4M3 rows; scale: float32 ``[E, P, ceil(N / 128), ceil(K / 128)]``."""

    scale_kind = numbers.BLOCK_SCALE
    scale_block = 128
    promoted = True


class Lanes(Layout):
    """values int16 ``[E, P, B, N, width]``, decoded to bfloat16, see ``lanes.py``.

    scale: 32-bit ``[E, P, B, words, N]``, or as the class says. row_scale: float32 ``[E, P, N]``, or None for INT4.
    """

    operand = torch.bfloat16
    stored = torch.int16
    per_lane: ClassVar[int] = 4  # codes

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of values."""
        experts, parts, n_out, _ = self.shape
        return experts, parts, self.k_blocks, n_out, self.block_k // self.per_lane

    @property
    def steps(self) -> tuple[int, int, int]:
        """Elements of values from one row, K block and part to the next."""
        width, n_out = self.block_k // self.per_lane, self.shape[2]
        return width, n_out * width, self.k_blocks * n_out * width


class RowLanes(Lanes):
    """E4M3 codes whose scales belong to whole rows."""

    weight = numbers.E4M3_LANES
    per_lane = 2
    bits = 8


class BlockLanes(RowLanes):
    """E4M3 codes with scale: float32 ``[E, P, ceil(N / 128), ceil(K / 128)]``, and no row_scale."""

    scale_kind = numbers.BLOCK_SCALE
    scale_block = 128
    promoted = True


class MxFp8Lanes(RowLanes):
    """E4M3 codes with E8M0 scales of 32 columns, and row_scale."""

    scale_kind = numbers.E8M0_SCALE
    bits = 8.25


class MxFp4Lanes(Lanes):
    """E2M1 codes with E8M0 scales of 32 columns, and row_scale."""

    weight = numbers.E2M1_LANES
    scale_kind = numbers.E8M0_SCALE
    bits = 4.25


class NvFp4Lanes(Lanes):
    """E2M1 codes with E4M3 scales of 16 columns, and row_scale."""

    weight = numbers.E2M1_LANES
    scale_kind = numbers.E4M3_SCALE
    block_k = 64
    bits = 4.5


class Int4Lanes(Lanes):
    """INT4 codes, one float32 scale for a row and K block."""

    weight = numbers.INT4_LANES
    scale_kind = numbers.GROUP_SCALE
    bits = 4.25
    promoted = True


class Int4PairLanes(Int4Lanes):
    """INT4 codes, a bfloat16 scale for each quarter of a K block, two in a word."""

    scale_kind = numbers.PAIR_SCALE
    words = 2
    bits = 4.5


class Int4FloatLanes(Int4Lanes):
    """INT4 codes, a float32 scale for each quarter of a K block."""

    words = 4
    bits = 5.0


class Int8Lanes(RowLanes):
    """INT8 codes, one float32 scale for a row and K block."""

    weight = numbers.INT8_LANES
    scale_kind = numbers.GROUP_SCALE
    bits = 8.25
    promoted = True


class Int8FloatLanes(Int8Lanes):
    """INT8 codes, a float32 scale for each quarter of a K block."""

    words = 4
    bits = 9.0


class Words(Layout):
    """values uint8 ``[E, R, B, 64, 64]`` for E4M3 rows, see ``words.py``; gate and up take turns in a row tile.

    scale: 32-bit ``[E, R, B, words, 64]`` of scale_dtype. row_scale: float32 ``[E, R * 64]`` if row_scaled, or None.
    """

    operand = torch.float8_e4m3fn
    stored = torch.uint8
    row_tile: ClassVar[int] = 64
    scale_dtype: ClassVar[torch.dtype] = torch.int32
    row_scaled: ClassVar[bool] = True
    scaled_rows = True
    row_order = REORDERED

    @property
    def row_tiles(self) -> int:
        """R."""
        return -(-self.shape[2] // (self.row_tile // self.shape[1]))

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of values."""
        return self.shape[0], self.row_tiles, self.k_blocks, self.row_tile, self.block_k // 2

    @property
    def operand_rows(self) -> tuple[int, int]:
        """Gate and up are rows of one operand."""
        return 1, self.row_tiles * self.row_tile


class MxFp4Words(Words):
    """E2M1 codes, groups of 32 columns with a power of two."""

    weight = numbers.E2M1_E8M0
    bits = 4.25


class NvFp4Words(Words):
    """E2M1 codes, groups of 16 columns with an E4M3 scale: each weight is the sum of two operands."""

    weight = numbers.E2M1_E4M3
    words = 2
    bits = 4.5
    operands = 2


class Int4Words(Words):
    """INT4 codes, one float32 scale for a row and K block."""

    weight = numbers.INT4_FLOAT
    scale_kind = numbers.GROUP_SCALE
    scale_dtype = torch.float32
    row_scaled = False
    bits = 4.25
    promoted = True


class Int4PairWords(Int4Words):
    """INT4 codes, a bfloat16 scale for each quarter of a K block, two in a word."""

    weight = numbers.INT4_PAIRS
    scale_dtype = torch.int32
    words = 2
    bits = 4.5
    row_order = PADDED
    quartered = True


class Int4FloatWords(Int4Words):
    """INT4 codes, a float32 scale for each quarter of a K block."""

    weight = numbers.INT4_FLOATS
    words = 4
    bits = 5.0
    row_order = PADDED
    quartered = True


class MxFp4Pairs(Words):
    """E2M1 codes as published, for tensor cores that decode them; scale uint8 ``[E, R, B, 64, 4]``, no row_scale."""

    weight = numbers.E2M1_SCALED
    scale_dtype = torch.uint8
    row_scaled = False
    bits = 4.25
    row_order = PADDED
