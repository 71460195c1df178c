"""Weights in the layouts the CPU experts read, and their decoding a tile of rows at a time.

Shape letters: E experts, N output rows, K input columns, Kp columns as stored (K up to whole groups), G groups.

A tile of decoded weights is written in bfloat16 with integer operations that torch vectorises: four E2M1 or
INT4 codes become four bfloat16 numbers in one look-up of 16 bits, E4M3 codes are shifted into the bit fields of
bfloat16. A tile leaves out ``row_scale``, a power of two per row or a global scale: the caller multiplies the
result by it in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import SpecError
from ...formats import Bf16, Fp8Block, Fp8Channel, Fp8Tensor, Fp16, Fp32, Int4Affine, Int4Group, MxFp4, MxFp8, NvFp4
from ...formats.codecs import E2M1_VALUES, pack_nibbles, relative_e8m0, scale_groups_, unpack_nibbles
from ...formats.payload import Payload
from ..base import map_tensors
from .stored import by_row, flat, refuse_faults

__all__ = ["CPU_FORMATS", "REORDERED_FORMATS", "CodeMatrix", "PlainMatrix", "Scratch", "pack_matrix"]

# Codes of zero keep exponent field 0 in the E2M1 table of MXFP4, code 0.5 has field 63; a group's scale is added
# to the field. The largest group of a row adds 64, so 0.5 becomes 1.0 and zero becomes 2^-63 of that: far below
# the rounding of a float32 sum, and it saves a multiplication per weight.
_MX_FIELD = 64
_INT16_FIELD = 7  # the exponent of bfloat16 starts at bit 7
# E4M3 bits read as bfloat16 are 2^120 too small: exponent biases 127 and 7.
_E4M3_LIFT = 2.0**120
_E4M3_FIELD = 247  # exponent field of the power of two that lifts by 2^120
_E4M3_MASK = 0x87F0 - 0x10000  # sign, four exponent and three mantissa bits, as a signed 16-bit number

# Weights decoded by one round of operations: 1 MiB of bfloat16 and as much of indices stay in the caches of two
# cores with 2 MiB each (Xeon with AMX, November 2026).
_STEP = 1 << 19


class Scratch:
    """Temporary memory for one ``run``: ``size`` decoded weights, and indices for one round of operations.

    longest: the longest row, the least that a round decodes. Allocated for each run, so threads share none.
    """

    def __init__(self, size: int, longest: int) -> None:
        self._index = torch.empty(-(-max(min(size, _STEP), longest) // 4), dtype=torch.int64, device="cpu")
        self._values = torch.empty(-(-size // 4), dtype=torch.int64, device="cpu")

    def index(self, count: int) -> Tensor:
        """Return an int64 buffer for the indices of ``count`` words of four weights."""
        return self._index[:count]

    def bits(self, rows: int, columns: int) -> Tensor:
        """Return an int16 buffer ``[rows, columns]`` over the decoded values."""
        return self._values.view(torch.int16)[: rows * columns].view(rows, columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainMatrix:
    """``values [E, N, K]`` floating point: no scales, nothing to decode."""

    values: Tensor
    row_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, rows, columns = self.values.shape
        return experts, rows, columns

    def tile_rows(self, dtype: torch.dtype, size: int) -> int:
        """Return how many rows one ``tile`` call should cover: all when no copy is needed."""
        rows, columns = self.values.shape[1:]
        return rows if self.values.dtype == dtype else max(1, size // max(1, columns))

    def arrange(self, x: Tensor) -> Tensor:
        """Return ``x [R, K]`` with the columns in stored order: itself."""
        return x

    def tile(self, expert: int, span: slice, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        """Return rows ``span`` of one expert, ``[rows, K]`` in ``dtype``; a view when that is the stored dtype."""
        return self.values[expert, span].to(dtype)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> PlainMatrix:
        """Return the matrix with ``change(tensor)`` for each tensor that has a row for each expert."""
        return map_tensors(self, change, "values")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeMatrix:
    """Codes of one projection of all experts and how they become weights.

    codes: ``[E, N, Kp/4]`` uint16, four 4-bit codes a word, lowest first, or ``[E, N, Kp]`` int8, E4M3 bits.
    table: ``[65536]`` int64, the four bfloat16 numbers of a word; None for E4M3.
    scales: ``[E, N, G]``; ``step`` tells their kind: ``exponent`` uint8 added to the exponent field;
        ``e4m3`` uint8 and ``power`` uint8 (exponent field) and ``value`` (floating point) multiply; None: none.
    zeros: uint8 ``[E, N, G]``, subtracted from the codes before a ``value`` multiplies them, or None.
    row_scale: ``[E, N]`` float32 for the caller, or None. columns, group: K and the columns of a scale.
    row_block: rows that share a row of ``scales``. strided: position p of group g is stored at column p * G + g,
        so that a row of scales multiplies contiguous columns, instead of g * group + p.
    """

    codes: Tensor
    table: Tensor | None = None
    scales: Tensor | None = None
    zeros: Tensor | None = None
    step: str = "none"
    row_scale: Tensor | None = None
    columns: int
    group: int = 1
    row_block: int = 1
    parts: int = 1
    strided: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        return self.codes.shape[0], self.codes.shape[1], self.columns

    @property
    def stored_columns(self) -> int:
        """Kp, the columns of a decoded tile."""
        return self.codes.shape[2] * (1 if self.table is None else 4)

    def tile_rows(self, dtype: torch.dtype, size: int) -> int:
        """Return how many rows one ``tile`` call should cover to decode about ``size`` weights."""
        return max(1, min(self.codes.shape[1], size // max(1, self.stored_columns)))

    def arrange(self, x: Tensor) -> Tensor:
        """Return ``x [R, K]`` as ``[R, Kp]``: columns in stored order, zeros beyond K."""
        stored = self.stored_columns
        if stored != self.columns:
            x = functional.pad(x, (0, stored - self.columns))
        if not self.strided:
            return x
        return x.view(-1, stored // self.group, self.group).transpose(1, 2).reshape(-1, stored)

    def tile(self, expert: int, span: slice, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        """Decode rows ``span`` of one expert: ``[rows, Kp]`` in ``dtype`` (bfloat16 or float32), short of row_scale.

        A bfloat16 result lives in ``scratch`` until the next call.
        """
        bits = scratch.bits(span.stop - span.start, self.stored_columns)
        step = max(1, _STEP // max(1, self.stored_columns))
        pieces: list[Tensor] = []
        for start in range(span.start, span.stop, step):
            rows = slice(start, min(start + step, span.stop))
            pieces.append(self._decode(expert, rows, dtype, bits[start - span.start :], scratch))
        if dtype == torch.bfloat16:
            return bits.view(torch.bfloat16)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> CodeMatrix:
        """Return the matrix with ``change(tensor)`` for each tensor but the table that all share."""
        return map_tensors(self, change, "codes", "scales", "zeros", "row_scale")

    def _decode(self, expert: int, span: slice, dtype: torch.dtype, bits: Tensor, scratch: Scratch) -> Tensor:
        """Decode rows ``span`` into the first rows of ``bits``."""
        codes = self.codes[expert, span]
        rows = codes.shape[0]
        bits = bits[:rows]
        if self.table is None:
            bits.copy_(codes)
            bits.bitwise_left_shift_(4).bitwise_and_(_E4M3_MASK)
        else:
            _look_up(self.table, codes, bits, scratch)
        values = bits.view(torch.bfloat16)
        if self.step == "exponent":
            assert self.scales is not None
            field = self.scales[expert, span].to(torch.int16).bitwise_left_shift_(_INT16_FIELD)
            bits.view(rows, -1, self.group).add_(field.unsqueeze(-1))
        elif self.step in ("e4m3", "power"):
            self._scale_in_bits(values, expert, span)
        elif self.table is None:
            values.mul_(_E4M3_LIFT)
        if self.step == "value":
            return self._scale_by_value(values, expert, span, dtype)
        return values.to(dtype)

    def _scale_in_bits(self, values: Tensor, expert: int, span: slice) -> None:
        assert self.scales is not None
        scales = self.scales[expert, span]
        shift = 4 if self.step == "e4m3" else _INT16_FIELD  # the table of E4M3 holds the lift
        factor = scales.to(torch.int16).bitwise_left_shift_(shift).view(torch.bfloat16)
        if self.strided:
            values.view(values.shape[0], self.group, -1).mul_(factor.unsqueeze(1))
        else:
            values.view(values.shape[0], -1, self.group).mul_(factor.unsqueeze(-1))

    def _scale_by_value(self, values: Tensor, expert: int, span: slice, dtype: torch.dtype) -> Tensor:
        assert self.scales is not None
        rows = torch.arange(span.start, span.stop, device="cpu")
        line = rows
        if self.row_block > 1:
            height = self.codes.shape[1] // self.parts
            blocks = -(-height // self.row_block)
            line = rows // height * blocks + rows % height // self.row_block
        factor = self.scales[expert].index_select(0, line)
        if dtype != torch.bfloat16:
            values, factor = values.to(dtype), factor.to(dtype)
        if self.zeros is not None:
            zeros = self.zeros[expert].index_select(0, line).to(values.dtype)
            scale_groups_(values, zeros, self.group, torch.Tensor.sub_)
        return scale_groups_(values, factor, self.group)


def _look_up(table: Tensor, codes: Tensor, bits: Tensor, scratch: Scratch) -> None:
    index, words = scratch.index(codes.numel()), bits.view(torch.int64)
    index.view(codes.shape).copy_(codes)
    # A gather from two dimensions runs in all threads, one from a single dimension does not.
    threads = torch.get_num_threads()
    lines = threads if index.numel() % threads == 0 else codes.shape[0]
    torch.gather(table.expand(lines, -1), 1, index.view(lines, -1), out=words.view(lines, -1))


def _table(values: tuple[float, ...]) -> Tensor:
    codes = torch.arange(1 << 16)
    four = torch.stack([codes >> shift & 15 for shift in (0, 4, 8, 12)], dim=-1)
    numbers = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)
    return numbers[four].view(torch.int64).flatten()


def _words(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint16)


def _mxfp4(payload: MxFp4) -> CodeMatrix:
    fields, largest = relative_e8m0(flat(payload.scales), _MX_FIELD)
    return CodeMatrix(
        codes=_words(flat(payload.codes)),
        table=_table(tuple(value * 2.0**-63 for value in E2M1_VALUES)),
        scales=fields,
        step="exponent",
        row_scale=largest.mul_(0.5),
        columns=payload.shape[-1],
        group=32,
    )


def _nvfp4(payload: NvFp4) -> CodeMatrix:
    scale, codes = payload.global_scale.float(), flat(payload.codes)
    words = torch.empty(codes.shape, dtype=torch.uint8)
    for expert, rows in enumerate(codes):
        grouped = unpack_nibbles(rows).view(rows.shape[0], -1, 16).transpose(1, 2)
        words[expert] = pack_nibbles(grouped.reshape(rows.shape[0], -1))
    return CodeMatrix(
        codes=_words(words),
        table=_table(tuple(value * _E4M3_LIFT for value in E2M1_VALUES)),
        scales=flat(payload.scales.view(torch.uint8)),
        step="e4m3",
        row_scale=by_row(scale.reciprocal() if payload.global_divides else scale, payload.shape),
        columns=payload.shape[-1],
        group=16,
        strided=True,
    )


def _int4(payload: Int4Group | Int4Affine) -> CodeMatrix:
    codes = flat(payload.codes)
    if codes.shape[-1] % 2:
        codes = functional.pad(codes, (0, 1))
    zeros = payload.zeros if isinstance(payload, Int4Affine) else None
    middle = 8 if zeros is None else 0
    return CodeMatrix(
        codes=_words(codes),
        table=_table(tuple(float(code - middle) for code in range(16))),
        scales=flat(payload.scales),
        zeros=None if zeros is None else flat(zeros),
        step="value",
        columns=payload.shape[-1],
        group=payload.group_size,
    )


def _e4m3(payload: MxFp8 | Fp8Tensor | Fp8Channel | Fp8Block) -> CodeMatrix:
    matrix = CodeMatrix(codes=flat(payload.codes.view(torch.int8)), columns=payload.shape[-1])
    match payload:
        case MxFp8():
            fields, largest = relative_e8m0(flat(payload.scales), _E4M3_FIELD)
            return replace(matrix, scales=fields, step="power", row_scale=largest, group=32)
        case Fp8Tensor():
            return replace(matrix, row_scale=by_row(payload.scale, payload.shape))
        case Fp8Channel():
            return replace(matrix, row_scale=payload.scales.flatten(1).float())
        case Fp8Block():
            parts = payload.shape[1] if len(payload.shape) == 4 else 1
            rows, columns = payload.block
            scales = flat(payload.scales)
            return replace(matrix, scales=scales, step="value", group=columns, row_block=rows, parts=parts)


CPU_FORMATS = (Bf16, Fp16, Fp32, Fp8Block, Fp8Tensor, Fp8Channel, MxFp8, MxFp4, NvFp4, Int4Group, Int4Affine)
REORDERED_FORMATS = (NvFp4,)  # packing copies their codes; the other formats' codes are used in place


def pack_matrix(payload: Payload, name: str, dtype: torch.dtype | None = None) -> PlainMatrix | CodeMatrix:
    """Bring ``payload`` of logical shape ``[E, N, K]`` or ``[E, P, N, K]`` into the CPU layout; parts become rows.

    Codes are shared with the payload where the layout is the same, else copied one expert at a time. dtype: what plain
    numbers are rounded to here instead of in every pass. Raises BadScaleError for scales or codes the format forbids
    (``Payload.faults``) and SpecError for another format.
    """
    refuse_faults(payload, name)
    match payload:
        case Bf16() | Fp16() | Fp32():
            return PlainMatrix(values=flat(payload.values).to(dtype or payload.values.dtype))
        case MxFp4():
            return _mxfp4(payload)
        case NvFp4():
            return _nvfp4(payload)
        case Int4Group() | Int4Affine():
            return _int4(payload)
        case MxFp8() | Fp8Tensor() | Fp8Channel() | Fp8Block():
            return _e4m3(payload)
        case _:
            allowed = ", ".join(known.name for known in CPU_FORMATS)
            raise SpecError(f"{name}: format {payload.name!r} has no CPU layout, allowed: {allowed}")
