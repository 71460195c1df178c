"""Four-bit weights for E4M3 activations: packing, and what it rounds.

A row of K is cut into blocks of 128 columns. Eight columns make a 32-bit word, magnitudes of columns 0 to 7 in bits
4 j to 4 j + 2, signs of columns 0 to 3 in bits 7, 15, 23, 31 and of columns 4 to 7 in bits 3, 11, 19, 27. Sixty-four
rows are together, block by block; with gate and up, eight rows of each alternate.

Number ranges. An E2M1 code c above 1 is the E4M3 byte (c << 2) + 8 d for the scale 2^(d - 6), 0.5 is 8 d: exact for
d from 1 to 12. Each row has a base: its largest group gets d = 12, so groups down to 2^-11 of it are exact; smaller
ones are rounded to the grid of d = 1. NVFP4's group scale is an E4M3 number: 1.5 * 2^e * scale may need six significant
bits, so a second operand holds half of it, and both are E4M3 numbers for scales within 2^-11 (2^-10) of the row's
largest. INT4's -8 to 7 are E4M3 numbers.

INT4 groups of less than 128 columns: the four quarters of a block are separate products, each with its scale. Word
4 t + q of a row and block then holds columns 4 t to 4 t + 3 of both halves of quarter q (t, q < 4), which are
neighbours of a thread of the tensor core, and rows of tokens keep their order.

Shape letters: E experts, P parts, N output rows, K input columns, B K blocks, R row tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ....formats import Int4Group, MxFp4, NvFp4
from ....formats.codecs import E2M1_VALUES, e2m1_codes, power_of_two, unpack_nibbles
from ....kernels import enums
from ..layout import WORDS, Words
from ..matrix import PackedMatrix, RangeReport
from .common import Unpacked, empty_weight, row_batches
from .integers import int4_scales, scales_by_word

__all__ = ["pack_w4a8", "unpack_w4a8"]

_ROW_TILE = WORDS["mxfp4"].row_tile
_BLOCK_K = WORDS["mxfp4"].block_k
_TOP_FIELD = 12  # exponent field of a row's largest group


def pack_w4a8(payload: MxFp4 | NvFp4 | Int4Group, bias: Tensor | None, *, scaled: bool = False) -> PackedMatrix:
    """Re-lay codes ``[E, P, N, K]`` and bring group scales to one base a row, a few rows at a time.

    values: uint8 ``[E, R, B, 64, 64]``; scale: int32 (INT4: float32, or two bfloat16 scales of quarters in an int32)
    ``[E, R, B, words, 64]``; row_scale: float32 ``[E, R * 64]`` (INT4: None). scaled: the tensor cores decode MXFP4
    (sm_100): pairs of codes as published, scale uint8 ``[E, R, B, 64, 4]``, no row_scale. Raises InputError for an
    empty weight and for INT4 groups other than multiples of 32.
    """
    if prod(payload.shape) == 0:
        raise empty_weight(payload.shape)
    if isinstance(payload, NvFp4):
        return _pack_rows(payload, WORDS["nvfp4"], _nvfp4_rows, bias)
    if isinstance(payload, Int4Group):
        return _pack_rows(payload, WORDS[f"int4_{int4_scales(payload)[0]}"], _int4_rows, bias)
    if scaled:
        return _pack_rows(payload, WORDS["mxfp4_pairs"], _pair_rows, bias)
    return _pack_rows(payload, WORDS["mxfp4"], _mxfp4_rows, bias)


def unpack_w4a8(packed: PackedMatrix) -> Unpacked:
    """Return codes uint8, after rounding, and the scales of groups. Codes of INT4 are 0 to 15 with a zero of 8."""
    layout = packed.layout
    assert isinstance(layout, Words)
    assert packed.scale is not None
    values = _from_tiles(packed.values.transpose(2, 3), layout)
    if layout.weight == enums.E2M1_SCALED:
        exponent = _from_tiles(packed.scale.permute(0, 1, 3, 2, 4), layout).flatten(3).double()
        codes = unpack_nibbles(values.flatten(3))
        return Unpacked(codes=codes[..., : layout.shape[3]], scales=torch.exp2(exponent - 127), group=32)
    codes = _from_words(values)
    words = _from_tiles(packed.scale.permute(0, 1, 4, 2, 3), layout)
    if layout.quartered:
        codes = codes.unflatten(-1, (layout.k_blocks, 4, 4, 2, 4)).permute(0, 1, 2, 3, 5, 6, 4, 7).flatten(3)
    codes = codes[..., : layout.shape[3]]
    if layout.weight in (enums.E2M1_E8M0, enums.E2M1_E4M3):
        assert packed.row_scale is not None
        scales = words.contiguous().view(torch.float8_e4m3fn).flatten(3).double()
        row_scale = _from_tiles(packed.row_scale.unflatten(-1, (layout.row_tiles, _ROW_TILE)), layout).double()
        group = 32 if layout.weight == enums.E2M1_E8M0 else 16
        # A code times the E4M3 number of its scale is half of the operand.
        return Unpacked(codes=codes, scales=2 * scales, group=group, row_scale=row_scale)
    scales = words.contiguous()
    if layout.scale_dtype == torch.int32:
        scales = scales.view(torch.bfloat16)
    scales = scales.flatten(3).double()
    group = _BLOCK_K * layout.k_blocks // scales.shape[-1]
    zeros = torch.full(scales.shape, 8, device=codes.device)
    return Unpacked(codes=codes ^ 8, scales=scales, group=group, zeros=zeros)


class _RowRange(NamedTuple):
    """Rows ``span`` of both parts of some experts, padded to ``rows`` rows and ``blocks`` K blocks.

    counts: groups beyond the range and weights changed, added to.
    """

    experts: slice
    span: slice
    rows: int
    blocks: int
    counts: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedRows:
    """Rows of a payload. codes: ``[e, P, rows, B, 64]`` uint8. scales: words ``[e, P, rows, B, words]``.

    factor: of each row, ``[e, P, rows]``, or None where the layout has none.
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor | None = None


def _pack_rows(
    payload: Any, layout: Words, rows_of: Callable[[Any, _RowRange], _PackedRows], bias: Tensor | None
) -> PackedMatrix:
    """Pack the rows that ``rows_of`` returns, some tiles at a time."""
    experts, parts, n_out, _ = payload.shape
    layout = layout.of(payload.shape)
    tiles, blocks = layout.row_tiles, layout.k_blocks
    device = payload.codes.device
    tile_rows = _ROW_TILE // parts  # of each part
    values = torch.empty(layout.values_shape, dtype=layout.stored, device=device)
    pairs = layout.scale_dtype == torch.uint8  # four bytes of a row and block, packed as one word
    dtype = torch.int32 if pairs else layout.scale_dtype
    scale = torch.empty((experts, tiles, blocks, layout.words, _ROW_TILE), dtype=dtype, device=device)
    row_scale = torch.zeros((experts, tiles, _ROW_TILE), device=device) if layout.row_scaled else None
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for some, span in row_batches(experts, tiles, _ROW_TILE * blocks * _BLOCK_K, device):
        stored = slice(span.start * tile_rows, min(span.stop * tile_rows, n_out))
        rows = rows_of(payload, _RowRange(some, stored, (span.stop - span.start) * tile_rows, blocks, counts))
        values[some, span] = _to_tiles(rows.codes).transpose(2, 3)
        scale[some, span] = _to_tiles(rows.scales).permute(0, 1, 3, 4, 2)
        if row_scale is not None and rows.factor is not None:
            row_scale[some, span] = _to_tiles(rows.factor)
    if pairs:
        scale = scale.view(torch.uint8).view(experts, tiles, blocks, _ROW_TILE, 4)
    if row_scale is not None:
        row_scale = row_scale.flatten(1)
    beyond, changed = counts.tolist()
    report = RangeReport(groups=payload.scales.numel(), beyond=beyond, changed=changed)
    return PackedMatrix(layout=layout, values=values, scale=scale, row_scale=row_scale, bias=bias, report=report)


def _pair_rows(payload: MxFp4, rows: _RowRange) -> _PackedRows:
    codes = _pad(payload.codes[rows.experts, :, rows.span], rows, 2, 0)
    scales = _pad(payload.scales[rows.experts, :, rows.span], rows, payload.group, 127)
    return _PackedRows(codes=codes.unflatten(-1, (rows.blocks, -1)), scales=_scale_words(scales, rows))


def _mxfp4_rows(payload: MxFp4, rows: _RowRange) -> _PackedRows:
    codes = _codes(payload, rows, 0)
    exponent = _pad(payload.scales[rows.experts, :, rows.span], rows, payload.group, 0).to(torch.int16)
    field, top = _fields(codes, exponent, None, payload.group, rows.counts)
    return _PackedRows(codes=_to_words(codes), scales=_scale_words(field << 3, rows), factor=_power(top - 133))


def _nvfp4_rows(payload: NvFp4, rows: _RowRange) -> _PackedRows:
    codes = _codes(payload, rows, 0)
    scales = payload.scales[rows.experts, :, rows.span].float()
    mantissa, exponent = torch.frexp(_pad(scales, rows, payload.group, 0))
    low = ((mantissa * 16) - 8).clamp(min=0).to(torch.int16)
    field, top = _fields(codes, exponent.to(torch.int16), low, payload.group, rows.counts)
    stored = payload.global_scale[rows.experts].float()
    global_scale = (1 / stored if payload.global_divides else stored).unsqueeze(-1)
    # frexp's mantissa lies in [0.5, 1).
    factor = _power(top - _TOP_FIELD + 5) * global_scale
    return _PackedRows(codes=_to_words(codes), scales=_scale_words((field << 3) | low, rows), factor=factor)


def _int4_rows(payload: Int4Group, rows: _RowRange) -> _PackedRows:
    codes = _codes(payload, rows, 8) ^ 8  # in two's complement
    words = scales_by_word(payload, payload.scales[rows.experts, :, rows.span], *int4_scales(payload))
    if words.shape[-1] > 1:
        # Quarter, half, t and column of four become t, quarter, half and column.
        codes = codes.unflatten(-1, (words.shape[-2], 4, 2, 4, 4)).permute(0, 1, 2, 3, 6, 4, 5, 7).flatten(3)
    words = functional.pad(words, (0, 0, 0, 0, 0, rows.rows - words.shape[2]))
    return _PackedRows(codes=_to_words(codes), scales=words)


def _codes(payload: Any, rows: _RowRange, padding: int) -> Tensor:
    """Return codes ``[e, P, rows, B * 128]`` uint8."""
    columns = payload.shape[3]
    nibbles = unpack_nibbles(payload.codes[rows.experts, :, rows.span])[..., :columns]
    return _pad(nibbles, rows, 1, padding)


def _scale_words(scales: Tensor, rows: _RowRange) -> Tensor:
    """Return group bytes ``[e, P, rows, G]`` as int32 words ``[e, P, rows, B, words]``."""
    return scales.to(torch.uint8).unflatten(-1, (rows.blocks, -1)).view(torch.int32)


def _fields(codes: Tensor, exponent: Tensor, low: Tensor | None, group: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's exponent field 1 to 12 and the exponent of field 12, ``[e, P, rows]`` int32.

    codes are changed in place where a group is below its row's range.
    """
    grouped = codes.view(*exponent.shape, group)
    used = ((grouped & 7).amax(-1)) > 0
    present = torch.where(used, exponent, -1000)
    if low is not None:
        # The largest significand at field 12 would reach the E4M3 code of NaN.
        present = present + (low == 7).to(torch.int16)
    top = present.amax(-1, keepdim=True)
    top = torch.where(top < -500, 0, top)
    field = exponent - top + _TOP_FIELD
    below = used & (field < 1)
    if bool(below.any()):
        values = torch.tensor(E2M1_VALUES, device=codes.device)
        index = below.nonzero(as_tuple=True)
        old = grouped[index]
        grouped[index] = e2m1_codes(values[old.int()] * _power(field[index].int() - 1).unsqueeze(-1))
        counts[0] += below.sum()
        counts[1] += ((old & 7) > 0).sum()
    return torch.where(used, field.clamp(1, _TOP_FIELD), 1), top.squeeze(-1).int()


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, subnormal or zero below -126."""
    half = exponent // 2
    return power_of_two(half.clamp(-126, 127)) * power_of_two((exponent - half).clamp(-126, 127))


def _pad(values: Tensor, rows: _RowRange, group: int, padding: int) -> Tensor:
    """Return ``[e, P, n, k]``, one for each ``group`` columns, as ``[e, P, rows, B * 128 / group]``."""
    columns = rows.blocks * _BLOCK_K // group - values.shape[-1]
    return functional.pad(values, (0, columns, 0, rows.rows - values.shape[2]), value=padding)


def _to_words(codes: Tensor) -> Tensor:
    """Return codes ``[e, P, rows, B * 128]`` as bytes of words ``[e, P, rows, B, 64]``."""
    eight = codes.unflatten(-1, (-1, 8))
    magnitudes, signs = eight & 7, eight & 8
    words = magnitudes[..., 0::2] | (magnitudes[..., 1::2] << 4) | signs[..., 4:] | (signs[..., :4] << 4)
    return words.reshape(*codes.shape[:3], -1, _BLOCK_K // 2)


def _from_words(words: Tensor) -> Tensor:
    """Return bytes of words ``[..., B, 64]`` as codes ``[..., B * 128]``."""
    four = words.unflatten(-1, (-1, 4))
    magnitudes = torch.stack((four & 7, four >> 4 & 7), dim=-1).flatten(-2)
    signs = torch.cat((four >> 4 & 8, four & 8), dim=-1)
    return (magnitudes | signs).flatten(-3)


def _to_tiles(rows: Tensor) -> Tensor:
    """Return ``[e, P, rows, ...]`` as ``[e, tiles, 64, ...]``, eight rows of each part in turn."""
    experts, parts, _, *rest = rows.shape
    by_eight = rows.view(experts, parts, -1, _ROW_TILE // parts // 8, 8, *rest).movedim(1, 3)
    return by_eight.reshape(experts, -1, _ROW_TILE, *rest)


def _from_tiles(tiles: Tensor, layout: Words) -> Tensor:
    """Return ``[E, R, 64, ...]`` as ``[E, P, N, ...]``."""
    _, parts, n_out, _ = layout.shape
    by_eight = tiles.unflatten(2, (-1, parts, 8)).movedim(3, 1)
    return by_eight.flatten(2, 4)[:, :, :n_out]
