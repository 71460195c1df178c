"""How one matrix of all experts is laid out for a kernel: a table by format, and sizes; no tensors.

A layout follows from the sizes of a layer and the names of its formats, so tiles can be chosen before any weight is
loaded. A layout with its tensors is a ``PackedMatrix`` (``matrix.py``).

Shape letters: E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs, B K blocks, R row tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch

from ...kernels import enums
from ...ops.quantize import AS_IS, PADDED, REORDERED
from .tiles.problem import TileProblem

__all__ = ["LANES", "ROWS", "WORDS", "Lanes", "Layout", "Rows", "Words", "float_rows"]

Shape = tuple[int, int, int, int]

_E4M3 = torch.float8_e4m3fn
_MAX_DEQUANTIZED_BYTES = 1 << 30  # dequantised at a time, unless one expert has more
_LARGE_GROUP = 128  # decoded numbers of a row that large tiles scale at once
# Scales of lanes that the kernel of large batches decodes in registers, by weight.
_REGISTER_SCALES = {
    enums.E2M1_LANES: (enums.E8M0_SCALE, enums.E4M3_SCALE),
    enums.INT4_LANES: (enums.GROUP_SCALE, enums.PAIR_SCALE, enums.ZERO_SCALE),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One matrix ``shape``, (E, P, N, K), as a kernel reads it; as published, unless a subclass differs.

    weight, scale_kind: see ``kernels/enums.py``. code_bits: of a weight without scales. operand:
    dtype of the rows that these weights multiply. stored: dtype of values. half: rows are float16 instead of operand;
    halved: they are converted here.
    block_k: columns of a step of the K loop. scale_block: rows that share a scale of a block. words: 32-bit words of
    group scales for a row and K block. scaled_rows: rows of x have scales.
    row_order: of their codes (``ops/quantize.py``). decoded, promoted, quartered, operands: see ``TileProblem``.
    """

    weight: int
    code_bits: int
    operand: torch.dtype
    stored: torch.dtype
    shape: Shape = (0, 0, 0, 0)
    half: bool = False
    halved: bool = False
    block_k: int = 128
    scale_kind: int = enums.NO_SCALE
    scale_block: int = 1
    words: int = 0
    scaled_rows: bool = False
    row_order: int = AS_IS
    decoded: bool = True
    promoted: bool = False
    quartered: bool = False
    operands: int = 1

    def of(self, shape: Sequence[int], *, half: bool = False) -> Self:
        """Return this layout of a matrix ``shape``."""
        experts, parts, n_out, k_in = shape
        return replace(self, shape=(experts, parts, n_out, k_in), half=half)

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of rows."""
        return torch.float16 if self.half or self.rescaled else self.operand

    @property
    def rescaled(self) -> bool:
        """Whether rows become float16 over a power of two each (``halves_and_sums``)."""
        return self.halved or self.minima

    @property
    def minima(self) -> bool:
        """Whether scales have minima, which sums of the rows' columns multiply."""
        return self.words == 3 or (self.scale_kind, self.words) == (enums.HALF_SCALE, 4)

    @property
    def running(self) -> bool:
        """Whether sums are in units of a group's factor, as those of integers are."""
        return self.weight in (enums.INT4_LANES, enums.INT8_LANES)

    @property
    def low_bits(self) -> bool:
        """Whether codes have two or three bits and a multiplier for each 16 columns."""
        return self.weight in (enums.TWO_BIT_LANES, enums.THREE_BIT_LANES)

    @property
    def bits(self) -> float:
        """Stored bits of a weight, scales of groups included."""
        number_bits = 0
        if self.low_bits:
            number_bits = 32 if self.scale_kind == enums.MINIMUM_STEPS else 16
        return self.code_bits + (32 * self.words + number_bits) / self.block_k

    @property
    def scale_words(self) -> int:
        """32-bit words of group scales for a K block of a part."""
        n_out = self.shape[2]
        if not self.low_bits:
            return self.words * n_out
        numbers = n_out if self.scale_kind == enums.MINIMUM_STEPS else -(-n_out // 8) * 4
        return self.words * n_out + numbers

    @property
    def k_blocks(self) -> int:
        """B, steps of the K loop."""
        return -(-self.shape[3] // self.block_k)

    @property
    def dequantized(self) -> Rows:
        """Layout of the decoded weights: 16-bit rows, and factors for each group where scales stay separate."""
        half = self.row_dtype == torch.float16
        plain = replace(ROWS["plain"].of(self.shape, half=half), stored=self.row_dtype)
        if self.scale_kind in (enums.NO_SCALE, enums.E8M0_SCALE, enums.E4M3_SCALE):
            return plain
        groups = self.words if self.operands == 2 else 1
        plain = replace(plain, block_k=self.block_k // groups, operands=self.operands)
        return replace(plain, scale_kind=enums.GROUP_SCALE, words=1)

    @property
    def dequantized_sizes(self) -> tuple[int, int]:
        """Bytes of an expert's decoded numbers and, at most, of its factors: 8 in 128 columns in any kind of file."""
        _, parts, n_out, k_in = self.shape
        return 2 * self.operands * parts * n_out * k_in, 32 * parts * n_out * -(-k_in // 128)

    @property
    def experts_per_group(self) -> int:
        """How many experts are decoded at a time."""
        return min(self.shape[0], max(1, _MAX_DEQUANTIZED_BYTES // sum(self.dequantized_sizes)))

    @property
    def in_registers(self) -> bool:
        """Whether the kernel of large batches decodes these weights in registers."""
        return False

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of a group's decoded experts, 0 for weights that are never decoded into memory."""
        if self.in_registers or not (self.decoded and self.runs_large):
            return 0
        return self.experts_per_group * sum(self.dequantized_sizes)

    @property
    def runs_large(self) -> bool:
        """Whether products of large batches may run: on weights as they are, or decoded in registers or to memory."""
        if self.in_registers:
            return True
        if self.operand == torch.float32:
            return False
        row_groups = self.code_bits == 8 and self.scale_kind == enums.GROUP_SCALE
        if self.running or self.low_bits or row_groups:
            return False
        rows = self.dequantized
        return rows.scale_kind != enums.GROUP_SCALE or rows.block_k * rows.operands == _LARGE_GROUP

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of values."""
        return *self.shape[:3], self.operands * self.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of values."""
        return prod(self.values_shape) * self.stored.itemsize

    @property
    def expert_scale_bytes(self) -> int:
        """Most bytes of an expert's scales, and of its order of columns."""
        _, parts, n_out, k_in = self.shape
        if self.scale_kind == enums.BLOCK_SCALE:
            return 4 * parts * self.scale_rows * self.k_blocks
        if self.running or self.weight == enums.TABLE_LANES:
            # Groups of 32 columns have four words in a K block, larger ones fewer.
            return 4 * (parts * self.k_blocks * max(4, self.words) * n_out + k_in + 16 * parts)
        of_rows = self.halved or self.weight != enums.PLAIN
        return 4 * parts * (self.k_blocks * self.scale_words + n_out * of_rows)

    def expert_bytes(self, *, bias: bool) -> int:
        """Return the most bytes of an expert with its scales, and a 32-bit bias where it has one."""
        _, parts, n_out, _ = self.shape
        return self.nbytes // self.shape[0] + self.expert_scale_bytes + 4 * parts * n_out * bias

    @property
    def steps(self) -> tuple[int, int, int]:
        """Elements of values from one row, K block and part to the next."""
        _, _, n_out, k_in = self.shape
        return k_in, self.block_k, n_out * k_in

    @property
    def x_columns(self) -> int:
        """Columns of x: reordered rows have whole K blocks."""
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
        """Return the tile problem of ``rows`` rows with these weights.

        x_bits: bits of an activation. x_groups: every 128 activations of a row have a scale.
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
            x_bits=x_bits + 4 * self.minima,  # 32 halves of sums for 128 columns
            decoded=self.decoded,
            promoted=x_groups or self.promoted,
            quartered=self.quartered,
            running=self.running,
            operands=self.operands,
            in_registers=self.in_registers,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(Layout):
    """values ``[E, P, N, K]`` as published: the operands themselves.

    With two operands a row holds the first ones of a group of block_k columns, the second ones, and so on, 2K in all.
    row_scale: float32 ``[E, P, N]``, or with BLOCK_SCALE scale: float32 ``[E, P, ceil(N / 128), ceil(K / 128)]``, with
    GROUP_SCALE ``[E, P, B, words, N]``: factors, and where words are 3 those of minima and words of minima.
    """

    decoded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes(Layout):
    """values int16 ``[E, P, B, N, width]``, decoded to 16 bits, see ``packing/interleave.py``.

    scale: 32-bit ``[E, P, B, words, N]``, or as in ``Rows``, or for codes of two and three bits int32 ``[E, P, B,
    scale_words]``, see ``packing/low_bits.py``. row_scale: float32 ``[E, P, N]``, None for integers, and
    int32 ``[E, P, 16]`` for codes that look numbers up: two operands, whose sum is the number.
    """

    operand: torch.dtype = torch.bfloat16
    stored: torch.dtype = torch.int16

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of values."""
        experts, parts, n_out, _ = self.shape
        return experts, parts, self.k_blocks, n_out, self.block_k * self.code_bits // 16

    @property
    def in_registers(self) -> bool:
        """Whether the kernel of large batches decodes these weights in registers: E2M1 and INT4 for bfloat16 rows."""
        if self.scaled_rows or self.row_dtype != torch.bfloat16 or self.shape[2] % 8 or self.shape[3] % 8:
            return False
        return self.scale_kind in _REGISTER_SCALES.get(self.weight, ())

    @property
    def steps(self) -> tuple[int, int, int]:
        """Elements of values from one row, K block and part to the next."""
        *_, n_out, width = self.values_shape
        return width, n_out * width, self.k_blocks * n_out * width


@dataclass(frozen=True, kw_only=True, slots=True)
class Words(Layout):
    """values uint8 ``[E, R, B, 64, 64]`` for E4M3 rows, see ``packing/w4a8.py``; gate and up alternate in a row tile.

    scale: 32-bit ``[E, R, B, words, 64]`` of scale_dtype. row_scale: float32 ``[E, R * 64]`` if row_scaled, or None.
    """

    code_bits: int = 4
    operand: torch.dtype = _E4M3
    stored: torch.dtype = torch.uint8
    words: int = 1
    scaled_rows: bool = True
    row_order: int = REORDERED
    row_tile: int = 64
    scale_dtype: torch.dtype = torch.int32
    row_scaled: bool = True

    @property
    def in_registers(self) -> bool:
        """Whether the kernel of large batches decodes these weights in registers."""
        return self.weight in (enums.E2M1_E8M0, enums.E2M1_E4M3) and self.shape[2] % 8 == 0

    @property
    def runs_large(self) -> bool:
        """Whether products of large batches may run; these weights are never decoded into memory."""
        return self.in_registers

    @property
    def row_tiles(self) -> int:
        """R."""
        return -(-self.shape[2] // (self.row_tile // self.shape[1]))

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of values."""
        return self.shape[0], self.row_tiles, self.k_blocks, self.row_tile, self.block_k // 2

    @property
    def expert_scale_bytes(self) -> int:
        """Bytes of an expert's scales."""
        rows = self.row_tiles * self.row_tile
        word = 4 if self.weight == enums.E2M1_SCALED else self.words * self.scale_dtype.itemsize
        return rows * (self.k_blocks * word + 4 * self.row_scaled)

    @property
    def operand_rows(self) -> tuple[int, int]:
        """Gate and up are rows of one operand."""
        return 1, self.row_tiles * self.row_tile


_BLOCKS = {"scale_kind": enums.BLOCK_SCALE, "scale_block": 128, "promoted": True}
_CODES = Rows(weight=enums.E4M3_E4M3, code_bits=8, operand=_E4M3, stored=_E4M3, scaled_rows=True)
# 16-bit weights in the dtype of the rows, unquantised ones of any dtype for float32 rows, and E4M3 codes for E4M3 rows,
# whose scales belong to rows or to blocks.
_GROUPS = {"scale_kind": enums.GROUP_SCALE, "words": 1, "promoted": True}
# ``fp8_groups``: blocks of other sizes than 128 x 128, whose scales are repeated for each row.
ROWS = {
    "plain": Rows(weight=enums.PLAIN, code_bits=16, operand=torch.bfloat16, stored=torch.bfloat16, block_k=64),
    "float32": Rows(weight=enums.PLAIN, code_bits=32, operand=torch.float32, stored=torch.float32, block_k=32),
    "fp8_rows": _CODES,
    "fp8_block": replace(_CODES, **_BLOCKS),
    "fp8_groups": replace(_CODES, **_GROUPS),
}


def float_rows(stored: torch.dtype) -> Rows:
    """Return the layout of unquantised weights of a dtype for float32 rows."""
    return replace(ROWS["float32"], stored=stored, code_bits=8 * stored.itemsize)


_E4M3_LANES = Lanes(weight=enums.E4M3_LANES, code_bits=8)
_E2M1_LANES = Lanes(weight=enums.E2M1_LANES, code_bits=4, words=1)
_NVFP4_LANES = replace(_E2M1_LANES, scale_kind=enums.E4M3_SCALE, block_k=64)
# Integers have one float32 scale for a row and K block, or ``words`` of them: one for each quarter, or two bfloat16 in
# a word (PAIR_SCALE). Blocks of GGUF are integers too. ``nvfp4_rows``: for rows in NVFP4, decoded but for their scales.
LANES = {
    "fp8_rows": _E4M3_LANES,
    "fp8_block": replace(_E4M3_LANES, **_BLOCKS),
    "fp8_groups": replace(_E4M3_LANES, **_GROUPS),
    "mxfp8": replace(_E4M3_LANES, scale_kind=enums.E8M0_SCALE, words=1),
    "mxfp4": replace(_E2M1_LANES, scale_kind=enums.E8M0_SCALE),
    "nvfp4": _NVFP4_LANES,
    "nvfp4_rows": replace(_NVFP4_LANES, scaled_rows=True),
    "int4": Lanes(weight=enums.INT4_LANES, code_bits=4, scale_kind=enums.GROUP_SCALE, words=1),
    "int8": Lanes(weight=enums.INT8_LANES, code_bits=8, scale_kind=enums.GROUP_SCALE, words=1),
    "two_bits": Lanes(weight=enums.TWO_BIT_LANES, code_bits=2, block_k=256, promoted=True),
    "three_bits": Lanes(weight=enums.THREE_BIT_LANES, code_bits=3, block_k=256, promoted=True),
    "table": Lanes(
        weight=enums.TABLE_LANES,
        code_bits=4,
        scale_kind=enums.GROUP_SCALE,
        words=2,
        promoted=True,
        quartered=True,
        operands=2,
    ),
}

_INT4 = Words(
    weight=enums.INT4_FLOAT,
    scale_kind=enums.GROUP_SCALE,
    row_scaled=False,
    promoted=True,
    scale_dtype=torch.float32,
)
_INT4_QUARTERS = replace(_INT4, row_order=PADDED, quartered=True)
# NVFP4: each weight is the sum of two operands. INT4 as in LANES, by words of a row and K block. Pairs: MXFP4 as
# published, for tensor cores that decode it; scale uint8 ``[E, R, B, 64, 4]``.
WORDS = {
    "mxfp4": Words(weight=enums.E2M1_E8M0),
    "mxfp4_pairs": Words(weight=enums.E2M1_SCALED, scale_dtype=torch.uint8, row_scaled=False, row_order=PADDED),
    "nvfp4": Words(weight=enums.E2M1_E4M3, words=2, operands=2),
    "int4_1": _INT4,
    "int4_2": replace(_INT4_QUARTERS, weight=enums.INT4_PAIRS, words=2, scale_dtype=torch.int32),
    "int4_4": replace(_INT4_QUARTERS, weight=enums.INT4_FLOATS, words=4),
}
