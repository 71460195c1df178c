"""Four-bit weights for E4M3 activations: packing, what it rounds, and the launch.

A row of K is cut into blocks of 128 columns. Eight columns make a 32-bit word, magnitudes of columns 0 to 7 in bits
4 j to 4 j + 2, signs of columns 0 to 3 in bits 7, 15, 23, 31 and of columns 4 to 7 in bits 3, 11, 19, 27. Sixty-four
rows stand together, block by block; with gate and up, eight rows of each take turns.

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

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ...formats.codecs import E2M1_VALUES, e2m1_codes, power_of_two, unpack_nibbles
from ...runtime.launch import launch
from ...types import ACTIVATION_KINDS, ActivationSpec
from .grouped import (
    E2M1_E4M3,
    E2M1_E8M0,
    E2M1_SCALED,
    GROUP_SCALE,
    INT4_FLOAT,
    INT4_FLOATS,
    INT4_PAIRS,
    NO_SCALE,
    PackedMatrix,
)
from .lanes import int4_scale_words, int4_scales

if TYPE_CHECKING:
    from torch import Tensor

    from ...formats.int4_group import Int4Group
    from ...formats.mxfp4 import MxFp4
    from ...formats.nvfp4 import NvFp4
    from .grouped import TileList

__all__ = ["RangeReport", "launch_w4a8", "pack_w4a8", "w4a8_constants"]

_INT4 = (INT4_FLOAT, INT4_PAIRS, INT4_FLOATS)
_CHUNK = 1 << 20  # codes re-laid at a time
_ROWS, _BLOCK = 64, 128


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeReport:
    """groups: group scales in all; beyond: groups too small for their row's base; changed: weights rounded for it."""

    groups: int
    beyond: int
    changed: int

    def __add__(self, other: RangeReport) -> RangeReport:
        """Return the report of both matrices."""
        return RangeReport(
            groups=self.groups + other.groups, beyond=self.beyond + other.beyond, changed=self.changed + other.changed
        )

    def __str__(self) -> str:
        """Return one line for the layer's plan."""
        if not self.beyond:
            return f"exact in E4M3, all {self.groups:,} groups within range"
        return (
            f"{self.beyond:,} of {self.groups:,} groups below the range of their row, {self.changed:,} weights rounded"
        )


def pack_w4a8(
    payload: MxFp4 | NvFp4 | Int4Group, bias: Tensor | None, *, scaled: bool = False
) -> tuple[PackedMatrix, RangeReport]:
    """Re-lay codes ``[E, P, N, K]`` and bring group scales to one base a row, a few rows at a time.

    values: uint8 ``[E, R, B, 64, 64]``; scale: int32 (INT4: float32, or two bfloat16 scales of quarters in an int32)
    ``[E, R, B, words, 64]``; row_scale: float32 ``[E, R * 64]`` (INT4: None). scaled: leave the decoding of MXFP4 to
    the tensor cores (sm_100): pairs of codes as published, scale uint8 ``[E, R, B, 64, 4]``, no row_scale. Raises
    InputError for an empty weight and for INT4 groups other than multiples of 32.
    """
    experts, parts, n_out, k_in = payload.shape
    if prod(payload.shape) == 0:
        raise InputError(f"packing: a weight of shape {payload.shape} is empty, allowed: at least one row and column")
    kind, words = _kind(payload)
    if scaled and kind == E2M1_E8M0:
        return _pack_scaled(payload, bias)
    one = _ROWS // parts
    tiles, blocks = -(-n_out // one), -(-k_in // _BLOCK)
    device = payload.codes.device
    values = torch.empty((experts, tiles, blocks, _ROWS, _BLOCK // 2), dtype=torch.uint8, device=device)
    dtype = torch.float32 if kind in (INT4_FLOAT, INT4_FLOATS) else torch.int32
    scale = torch.empty((experts, tiles, blocks, words, _ROWS), dtype=dtype, device=device)
    row_scale = None if kind in _INT4 else torch.zeros((experts, tiles * _ROWS), device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    step = max(1, _CHUNK // (_ROWS * blocks * _BLOCK))
    for expert in range(experts):
        for start in range(0, tiles, step):
            stop = min(start + step, tiles)
            span = slice(start * one, min(stop * one, n_out))
            codes, scales, factor = _rows(payload, expert, span, (stop - start) * one, blocks, counts)
            values[expert, start:stop] = _laid(_words(codes), stop - start, parts).transpose(1, 2)
            scale[expert, start:stop] = _laid(scales, stop - start, parts).permute(0, 2, 3, 1)
            if row_scale is not None:
                row_scale[expert, start * _ROWS : stop * _ROWS] = _laid(factor, stop - start, parts).flatten()
    beyond, changed = counts.tolist()
    matrix = PackedMatrix(
        values=values,
        shape=(experts, parts, n_out, k_in),
        weight=kind,
        block_k=_BLOCK,
        bits=4 + 32 * words / _BLOCK,
        scale_kind=GROUP_SCALE if kind in _INT4 else NO_SCALE,
        words=words,
        scale=scale,
        row_scale=row_scale,
        bias=bias,
    )
    return matrix, RangeReport(groups=payload.scales.numel(), beyond=beyond, changed=changed)


def _pack_scaled(payload: Any, bias: Tensor | None) -> tuple[PackedMatrix, RangeReport]:
    experts, parts, n_out, k_in = payload.shape
    one = _ROWS // parts
    tiles, blocks = -(-n_out // one), -(-k_in // _BLOCK)
    device, rows = payload.codes.device, -(-n_out // one) * one
    values = torch.empty((experts, tiles, blocks, _ROWS, _BLOCK // 2), dtype=torch.uint8, device=device)
    scale = torch.empty((experts, tiles, blocks, _ROWS, 4), dtype=torch.uint8, device=device)
    for expert in range(experts):
        codes = _filled(payload.codes[expert], blocks * _BLOCK // 2 - payload.codes.shape[-1], rows, 0)
        scales = _filled(payload.scales[expert], blocks * 4 - payload.scales.shape[-1], rows, 127)
        values[expert] = _laid(codes.unflatten(-1, (blocks, -1)), tiles, parts).transpose(1, 2)
        scale[expert] = _laid(scales.unflatten(-1, (blocks, -1)), tiles, parts).transpose(1, 2)
    matrix = PackedMatrix(
        values=values,
        shape=(experts, parts, n_out, k_in),
        weight=E2M1_SCALED,
        block_k=_BLOCK,
        bits=4.25,
        scale=scale,
        bias=bias,
    )
    return matrix, RangeReport(groups=payload.scales.numel(), beyond=0, changed=0)


def launch_w4a8(
    x: Tensor,
    packed: PackedMatrix,
    expert_offsets: Tensor,
    tiles: TileList,
    out: Tensor,
    source: Tensor | None,
    x_scale: Tensor | None,
    activation: ActivationSpec | None,
) -> Tensor:
    """Write and return ``out [R, N]``: ``grouped_gemm`` for weights of ``pack_w4a8`` and reordered E4M3 rows."""
    spec = activation or ActivationSpec()
    tile, spare = tiles.tile, packed.values
    row_tiles = packed.values.shape[1]
    from ...kernels.w4a8 import w4a8_kernel

    args = (
        x,
        x_scale,
        packed.values,
        packed.scale,
        spare if packed.row_scale is None else packed.row_scale,
        spare if packed.bias is None else packed.bias,
        out,
        spare if source is None else source,
        expert_offsets,
        tiles.expert,
        tiles.row,
        packed.shape[2],
        x.stride(0),
        row_tiles,
        tiles.count,
        packed.shape[0],
        float(spec.limit or 0.0),
        float(spec.alpha),
        float(spec.gate_bound),
        float(spec.up_bound),
    )
    constants = w4a8_constants(packed, activation) | {
        "X_SCALE": 1 if x_scale is not None and x_scale.shape[1] == packed.k_blocks > 1 else 2,
        "GATHER": source is not None,
        "WARPS": tile.warps,
        "BLOCK_N": tile.block_n,
        "BLOCK_T": tile.block_t,
        "GROUP_T": tile.group_t,
        "STAGES": tile.stages,
        **tiles.constants(x),
    }
    grid = (tiles.count * -(-row_tiles * _ROWS // tile.block_n),)
    launch(w4a8_kernel, grid, args, constants, num_warps=tile.warps)
    return out


def w4a8_constants(packed: PackedMatrix, activation: ActivationSpec | None) -> dict[str, Any]:
    """Return the compile-time arguments that follow from the weights and the activation."""
    return {
        "WEIGHT": packed.weight,
        "BIAS": packed.bias is not None,
        "PARTS": packed.shape[1],
        "KIND": -1 if activation is None else ACTIVATION_KINDS.index(activation.kind),
        "HAS_LIMIT": activation is not None and activation.limit is not None,
        "K_BLOCKS": packed.k_blocks,
        "BLOCK_K": packed.block_k,
    }


def _kind(payload: Any) -> tuple[int, int]:
    """Return how the kernel reads this payload and its 32-bit scale words for a row and K block."""
    if payload.name == "mxfp4":
        return E2M1_E8M0, 1
    if payload.name == "nvfp4":
        return E2M1_E4M3, 2
    words, _ = int4_scales(payload)
    return {1: INT4_FLOAT, 2: INT4_PAIRS, 4: INT4_FLOATS}[words], words


def _rows(
    payload: Any, expert: int, span: slice, rows: int, blocks: int, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[P, rows, B * 128]`` uint8, scale words ``[P, rows, B, words]`` and factors ``[P, rows]``.

    counts: groups beyond the range and weights changed, added to.
    """
    zero = 8 if payload.name == "int4_group" else 0
    short = blocks * _BLOCK - payload.shape[3]
    nibbles = unpack_nibbles(payload.codes[expert, :, span])[..., : payload.shape[3]]
    codes = _filled(nibbles, short, rows, zero)
    scales = payload.scales[expert, :, span]
    if payload.name == "int4_group":
        return _int4_rows(codes ^ 8, int4_scale_words(payload, scales), rows)
    wanted = blocks * _BLOCK // payload.group - scales.shape[-1]
    if payload.name == "mxfp4":
        exponent, low = _filled(scales, wanted, rows, 0).to(torch.int16), None
    else:
        mantissa, exponent = torch.frexp(_filled(scales.float(), wanted, rows, 0))
        exponent, low = exponent.to(torch.int16), ((mantissa * 16) - 8).clamp(min=0).to(torch.int16)
    field, top = _fields(codes, exponent, low, payload.group, counts)
    bytes_ = (field << 3) if low is None else (field << 3) | low
    words = bytes_.to(torch.uint8).view(*codes.shape[:2], blocks, -1).view(torch.int32)
    if payload.name == "mxfp4":
        return codes, words, _power(top - 133)
    own = payload.global_scale[expert].float()
    own = (1 / own if payload.global_divides else own).unsqueeze(-1)
    # frexp's mantissa lies in [0.5, 1).
    return codes, words, _power(top - 12 + 5) * own


def _int4_rows(codes: Tensor, words: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``_rows`` does, for codes in two's complement; no row has a factor."""
    if words.shape[-1] > 1:
        # Quarter, half, t and column of four become t, quarter, half and column.
        codes = codes.unflatten(-1, (words.shape[-2], 4, 2, 4, 4)).permute(0, 1, 2, 5, 3, 4, 6).flatten(2)
    words = _filled(words.flatten(-2), 0, rows, 0).unflatten(-1, words.shape[-2:])
    return codes, words, words.new_zeros(words.shape[:2])


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


def _filled(values: Tensor, columns: int, rows: int, zero: int) -> Tensor:
    """Return ``[P, n, k]`` as ``[P, rows, k + columns]``, filled with ``zero``."""
    return torch.nn.functional.pad(values, (0, columns, 0, rows - values.shape[1]), value=zero)


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
