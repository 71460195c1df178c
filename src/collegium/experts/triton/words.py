"""Four-bit weights for E4M3 activations: packing, and what it rounds.

A row of K is cut into blocks of 128 columns. Eight columns make a 32-bit word, magnitudes of columns 0 to 7 in bits
4 j to 4 j + 2, signs of columns 0 to 3 in bits 7, 15, 23, 31 and of columns 4 to 7 in bits 3, 11, 19, 27. Sixty-four
rows are together, block by block; with gate and up, eight rows of each take turns.

Number ranges. An E2M1 code c above 1 is the E4M3 byte (c << 2) + 8 d for the scale 2^(d - 6), 0.5 is 8 d: exact for
d from 1 to 12. Each row has its own base, its largest group gets d = 12, so groups down to 2^-11 of it are exact;
smaller ones are rounded to the grid of d = 1. NVFP4's group scale is an E4M3 number: 1.5 * 2^e * scale may need six
significant bits, so a second operand holds half of it, and both are E4M3 numbers for scales within 2^-11 (2^-10) of
the row's largest. INT4's -8 to 7 are E4M3 numbers.

INT4 groups of less than 128 columns: the four quarters of a block are products of their own, each scaled by itself.
Word 4 t + q of a row and block then holds columns 4 t to 4 t + 3 of both halves of quarter q (t, q < 4), which are
neighbours of a thread of the tensor core, and rows of tokens keep their order.

Shape letters: E experts, P parts, N output rows, K input columns, B K blocks, R row tiles.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import InputError
from ...formats import Int4Group, MxFp4, NvFp4
from ...formats.codecs import E2M1_VALUES, e2m1_codes, power_of_two, unpack_nibbles
from .lanes import by_word, int4_scales
from .layout import WORDS
from .matrix import PackedMatrix, RangeReport

__all__ = ["pack_w4a8"]

_CHUNK = 1 << 20  # codes re-laid at a time
_ROWS, _BLOCK = WORDS["mxfp4"].row_tile, WORDS["mxfp4"].block_k


def pack_w4a8(payload: MxFp4 | NvFp4 | Int4Group, bias: Tensor | None, *, scaled: bool = False) -> PackedMatrix:
    """Re-lay codes ``[E, P, N, K]`` and bring group scales to one base a row, a few rows at a time.

    values: uint8 ``[E, R, B, 64, 64]``; scale: int32 (INT4: float32, or two bfloat16 scales of quarters in an int32)
    ``[E, R, B, words, 64]``; row_scale: float32 ``[E, R * 64]`` (INT4: None). scaled: leave the decoding of MXFP4 to
    the tensor cores (sm_100): pairs of codes as published, scale uint8 ``[E, R, B, 64, 4]``, no row_scale. Raises
    InputError for an empty weight and for INT4 groups other than multiples of 32.
    """
    if prod(payload.shape) == 0:
        raise InputError(f"packing: a weight of shape {payload.shape} is empty, allowed: at least one row and column")
    if isinstance(payload, MxFp4):
        kind, rows_of = ("mxfp4_pairs", _pair_rows) if scaled else ("mxfp4", _mxfp4_rows)
        return _packed(payload, kind, rows_of, bias)
    if isinstance(payload, NvFp4):
        return _packed(payload, "nvfp4", _nvfp4_rows, bias)
    return _packed(payload, f"int4_{int4_scales(payload)[0]}", _int4_rows, bias)


class _Piece(NamedTuple):
    """Rows ``span`` of both parts of an expert, filled up to ``rows`` rows and ``blocks`` K blocks.

    counts: groups beyond the range and weights changed, added to.
    """

    expert: int
    span: slice
    rows: int
    blocks: int
    counts: Tensor


def _packed(
    payload: Any, kind: str, rows_of: Callable[[Any, _Piece], tuple[Tensor, Tensor, Tensor | None]], bias: Tensor | None
) -> PackedMatrix:
    """Pack what ``rows_of`` returns of each piece: codes ``[P, rows, B, 64]`` uint8, scale words and factors.

    Scale words are ``[P, rows, B, words]``, factors ``[P, rows]``, or None where the layout has none.
    """
    experts, parts, n_out, _ = payload.shape
    layout = WORDS[kind].of(payload.shape)
    one, tiles, blocks, device = _ROWS // parts, layout.row_tiles, layout.k_blocks, payload.codes.device
    values = torch.empty(layout.values_shape, dtype=layout.stored, device=device)
    pairs = layout.scale_dtype == torch.uint8  # four bytes of a row and block, packed as one word
    dtype = torch.int32 if pairs else layout.scale_dtype
    scale = torch.empty((experts, tiles, blocks, layout.words, _ROWS), dtype=dtype, device=device)
    row_scale = torch.zeros((experts, tiles * _ROWS), device=device) if layout.row_scaled else None
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    step = max(1, _CHUNK // (_ROWS * blocks * _BLOCK))
    for expert in range(experts):
        for start in range(0, tiles, step):
            stop = min(start + step, tiles)
            span = slice(start * one, min(stop * one, n_out))
            codes, scales, factor = rows_of(payload, _Piece(expert, span, (stop - start) * one, blocks, counts))
            values[expert, start:stop] = _laid(codes, stop - start, parts).transpose(1, 2)
            scale[expert, start:stop] = _laid(scales, stop - start, parts).permute(0, 2, 3, 1)
            if row_scale is not None and factor is not None:
                row_scale[expert, start * _ROWS : stop * _ROWS] = _laid(factor, stop - start, parts).flatten()
    if pairs:
        scale = scale.view(torch.uint8).view(experts, tiles, blocks, _ROWS, 4)
    beyond, changed = counts.tolist()
    report = RangeReport(groups=payload.scales.numel(), beyond=beyond, changed=changed)
    return PackedMatrix(layout=layout, values=values, scale=scale, row_scale=row_scale, bias=bias, report=report)


def _pair_rows(payload: MxFp4, piece: _Piece) -> tuple[Tensor, Tensor, None]:
    codes, scales = (stored[piece.expert, :, piece.span] for stored in (payload.codes, payload.scales))
    codes, scales = _filled(codes, piece, 2, 0), _filled(scales, piece, payload.group, 127)
    return codes.unflatten(-1, (piece.blocks, -1)), _scale_words(scales, piece), None


def _mxfp4_rows(payload: MxFp4, piece: _Piece) -> tuple[Tensor, Tensor, Tensor]:
    codes = _codes(payload, piece, 0)
    exponent = _filled(payload.scales[piece.expert, :, piece.span], piece, payload.group, 0).to(torch.int16)
    field, top = _fields(codes, exponent, None, payload.group, piece.counts)
    return _words(codes), _scale_words(field << 3, piece), _power(top - 133)


def _nvfp4_rows(payload: NvFp4, piece: _Piece) -> tuple[Tensor, Tensor, Tensor]:
    codes = _codes(payload, piece, 0)
    scales = payload.scales[piece.expert, :, piece.span].float()
    mantissa, exponent = torch.frexp(_filled(scales, piece, payload.group, 0))
    low = ((mantissa * 16) - 8).clamp(min=0).to(torch.int16)
    field, top = _fields(codes, exponent.to(torch.int16), low, payload.group, piece.counts)
    own = payload.global_scale[piece.expert].float()
    own = (1 / own if payload.global_divides else own).unsqueeze(-1)
    # frexp's mantissa lies in [0.5, 1).
    return _words(codes), _scale_words((field << 3) | low, piece), _power(top - 12 + 5) * own


def _int4_rows(payload: Int4Group, piece: _Piece) -> tuple[Tensor, Tensor, None]:
    codes = _codes(payload, piece, 8) ^ 8  # in two's complement
    words = by_word(payload, payload.scales[piece.expert, :, piece.span], *int4_scales(payload))
    if words.shape[-1] > 1:
        # Quarter, half, t and column of four become t, quarter, half and column.
        codes = codes.unflatten(-1, (words.shape[-2], 4, 2, 4, 4)).permute(0, 1, 2, 5, 3, 4, 6).flatten(2)
    words = functional.pad(words, (0, 0, 0, 0, 0, piece.rows - words.shape[1]))
    return _words(codes), words, None


def _codes(payload: Any, piece: _Piece, zero: int) -> Tensor:
    """Return the piece's codes ``[P, rows, B * 128]`` uint8, filled with ``zero``."""
    columns = payload.shape[3]
    nibbles = unpack_nibbles(payload.codes[piece.expert, :, piece.span])[..., :columns]
    return _filled(nibbles, piece, 1, zero)


def _scale_words(bytes_: Tensor, piece: _Piece) -> Tensor:
    """Return group bytes ``[P, rows, G]`` as int32 words ``[P, rows, B, words]``."""
    return bytes_.to(torch.uint8).view(*bytes_.shape[:2], piece.blocks, -1).view(torch.int32)


def _fields(codes: Tensor, exponent: Tensor, low: Tensor | None, group: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's exponent field 1 to 12 and the exponent of field 12, ``[P, rows]`` int32.

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
    field = exponent - top + 12
    below = used & (field < 1)
    if bool(below.any()):
        values = torch.tensor(E2M1_VALUES, device=codes.device)
        places = below.nonzero(as_tuple=True)
        old = grouped[places]
        new = e2m1_codes(values[old.int()] * _power(field[places].int() - 1).unsqueeze(-1))
        grouped[places] = new
        counts[0] += below.sum()
        counts[1] += ((old & 7) > 0).sum()
    return torch.where(used, field.clamp(1, 12), 1), top.squeeze(-1).int()


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, subnormal or zero below -126."""
    half = exponent // 2
    return power_of_two(half.clamp(-126, 127)) * power_of_two((exponent - half).clamp(-126, 127))


def _filled(values: Tensor, piece: _Piece, group: int, zero: int) -> Tensor:
    """Return ``[P, n, k]``, one for each ``group`` columns, as ``[P, rows, B * 128 / group]``, filled with ``zero``."""
    short = piece.blocks * _BLOCK // group - values.shape[-1]
    return functional.pad(values, (0, short, 0, piece.rows - values.shape[1]), value=zero)


def _words(codes: Tensor) -> Tensor:
    """Return codes ``[P, rows, B * 128]`` as bytes of words ``[P, rows, B, 64]``."""
    eight = codes.view(*codes.shape[:2], -1, 8)
    magnitudes, signs = eight & 7, eight & 8
    bytes_ = magnitudes[..., 0::2] | (magnitudes[..., 1::2] << 4) | signs[..., 4:] | (signs[..., :4] << 4)
    return bytes_.reshape(*codes.shape[:2], -1, _BLOCK // 2)


def _laid(rows: Tensor, tiles: int, parts: int) -> Tensor:
    """Return ``[P, rows, ...]`` as ``[tiles, 64, ...]``, eight rows of each part in turn."""
    rest = rows.shape[2:]
    split = rows.view(parts, tiles, _ROWS // parts // 8, 8, *rest).movedim(0, 2)
    return split.reshape(tiles, _ROWS, *rest)
