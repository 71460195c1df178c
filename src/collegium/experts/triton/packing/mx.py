"""MXFP4, MXFP8 and NVFP4 weights for 16-bit tokens: codes and scales of groups interleaved."""

from functools import partial

import torch
from torch import Tensor

from ....formats.codecs import relative_e8m0, unpack_nibbles
from ....formats.mxfp4 import MxFp4
from ....formats.mxfp8 import MxFp8
from ....formats.nvfp4 import NvFp4
from ....kernels import enums
from ..layout import LANES, Lanes
from ..matrix import PackedMatrix
from .common import Unpacked, from_scale_words, to_scale_words
from .interleave import E2M1, E2M1_HALF, EIGHT_BITS, LaneCodec, deinterleave, interleave, interleave_bytes

__all__ = ["pack_mx", "pack_nvfp4", "unpack_mx", "unpack_nvfp4"]

# Decoding a lane leaves a code times 2^-DECODED, by whether it is E4M3 (else E2M1) and whether it becomes float16.
_DECODED = {(False, False): 126, (False, True): 14, (True, False): 120, (True, True): 8}
# E8M0 byte of a row's largest scale after packing, likewise.
_LARGEST = {(False, False): 253, (False, True): 30, (True, False): 247, (True, True): 30}
# What the largest scale leaves of that: of 2^126 and 2^120 1, in float16 of 2^15 2 and 128.
_REMAINDER = {(False, False): 1, (False, True): 2, (True, False): 1, (True, True): 128}
# An E4M3 scale of NVFP4 becomes itself times 2^117, in float16 times 2^7.
_NVFP4_SCALE = {False: 117, True: 7}


def pack_mx(payload: MxFp4 | MxFp8, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Interleave codes; E8M0 scales are relative to the largest of their row, which is applied after the sum.

    Lanes of MXFP8 decode to code times 2^-120, which the largest scale, 2^120, undoes. A group of MXFP4 below 2^-252 of
    its row's largest decodes to zero, and one below 2^-126 loses low bits: nothing else is rounded. With float16 tokens
    (half) the largest scale is 2^15 and groups below 2^-24 of it lose low bits, of MXFP8 below 2^-22.
    """
    layout = LANES[payload.name].of(payload.shape)
    eight = isinstance(payload, MxFp8)
    relative, largest = relative_e8m0(payload.scales, _LARGEST[eight, half])
    values = interleave_bytes(payload.codes, layout) if eight else _interleave_e2m1(payload.codes, layout, half=half)
    scale = to_scale_words(relative, layout.k_blocks)
    return PackedMatrix(
        layout=layout, values=values, scale=scale, row_scale=largest / _REMAINDER[eight, half], bias=bias
    )


def unpack_mx(packed: PackedMatrix, *, half: bool = False) -> Unpacked:
    """Return codes uint8 and the scales of groups of 32 columns; half: as in ``pack_mx``."""
    layout = _lanes(packed)
    eight = layout.weight == enums.E4M3_LANES
    codes = deinterleave(packed.values, layout, EIGHT_BITS if eight else _e2m1(half=half))
    assert packed.scale is not None
    assert packed.row_scale is not None
    exponent = from_scale_words(packed.scale, torch.uint8).double()
    scales = torch.exp2(exponent - (15 if half else 127) - _DECODED[eight, half])
    return Unpacked(
        codes=codes, scales=scales.masked_fill(exponent == 0, 0), group=32, row_scale=packed.row_scale.double()
    )


def pack_nvfp4(payload: NvFp4, bias: Tensor | None, *, half: bool = False, scaled_rows: bool = False) -> PackedMatrix:
    """Interleave codes; E4M3 group scales stay as they are, the global scale is applied after the sum.

    scaled_rows: rows of activations have scales.
    """
    layout = LANES["nvfp4_rows" if scaled_rows else "nvfp4"].of(payload.shape)
    scale = payload.global_scale.float()
    # Lanes decode to code times 2^-126 and group scales to scale times 2^117, in float16 (half) 2^-14 and 2^7.
    row_scale = (scale.reciprocal() if payload.global_divides else scale) * (128.0 if half else 512.0)
    row_scale = row_scale.unsqueeze(-1).expand(payload.shape[:3]).contiguous()
    return PackedMatrix(
        layout=layout,
        values=_interleave_e2m1(payload.codes, layout, half=half),
        scale=to_scale_words(payload.scales.view(torch.uint8), layout.k_blocks),
        row_scale=row_scale,
        bias=bias,
    )


def unpack_nvfp4(packed: PackedMatrix, *, half: bool = False) -> Unpacked:
    """Return codes uint8 and the scales of groups of 16 columns; half: as in ``pack_nvfp4``."""
    layout = _lanes(packed)
    assert packed.scale is not None
    assert packed.row_scale is not None
    scales = from_scale_words(packed.scale, torch.uint8).view(torch.float8_e4m3fn).double()
    return Unpacked(
        codes=deinterleave(packed.values, layout, _e2m1(half=half)),
        scales=scales * 2.0 ** (_NVFP4_SCALE[half] - _DECODED[False, half]),
        group=16,
        row_scale=packed.row_scale.double(),
    )


def _interleave_e2m1(codes: Tensor, layout: Lanes, *, half: bool) -> Tensor:
    return interleave(layout, _e2m1(half=half), partial(_rows_of, codes, layout.shape[3]), device=codes.device)


def _rows_of(codes: Tensor, columns: int, experts: slice, span: slice) -> Tensor:
    return unpack_nibbles(codes[experts, :, span])[..., :columns]


def _e2m1(*, half: bool) -> LaneCodec:
    return E2M1_HALF if half else E2M1


def _lanes(packed: PackedMatrix) -> Lanes:
    assert isinstance(packed.layout, Lanes)
    return packed.layout
