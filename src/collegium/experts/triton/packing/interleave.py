"""The interleaved layout: codes of four to eight bits in 16-bit lanes, for kernels that decode to 16 bits.

A lane holds the codes of columns k, k + q, k + 2q and k + 3q of one row, q a quarter of the K block, at the bits
that ``kernels/decode_ptx.py`` names; lanes of eight-bit codes hold k and k + q, and after all of those k + 2q and
k + 3q. Rows of a K block are adjacent, so a tile is one run of memory.

Shape letters: E experts, P parts, N output rows, K input columns, B K blocks.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..layout import Lanes
from .common import empty_weight, row_batches

__all__ = [
    "E2M1",
    "E2M1_HALF",
    "EIGHT_BITS",
    "INT4",
    "LaneCodec",
    "RowsOf",
    "deinterleave",
    "interleave",
    "interleave_bytes",
]

RowsOf = Callable[[slice, slice], Tensor]  # codes uint8 [e, P, n, K] of experts and rows, in packed order


class LaneCodec(NamedTuple):
    """How codes lie in lanes.

    pack: int32 codes ``[..., B, 4, q]``, the quarters of K blocks, to lanes ``[..., B, q or 2 q]``. unpack: inverse.
    """

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


def interleave(layout: Lanes, codec: LaneCodec, rows_of: RowsOf, *, device: torch.device, padding: int = 0) -> Tensor:
    """Return the lanes of a matrix; padding: the code of columns beyond K in the last K block.

    Raises InputError for an empty weight.
    """
    if prod(layout.values_shape) == 0:
        raise empty_weight(layout.shape)
    lanes = torch.empty(layout.values_shape, dtype=layout.stored, device=device)
    _fill(lanes, layout, codec, rows_of, padding)
    return lanes


def deinterleave(lanes: Tensor, layout: Lanes, codec: LaneCodec) -> Tensor:
    """Return the codes uint8 ``[E, P, N, K]`` of lanes, in packed order."""
    by_row = lanes.transpose(2, 3).flatten(0, 2).to(torch.int32) & 0xFFFF
    codes = codec.unpack(by_row).to(torch.uint8)
    return codes.reshape(*layout.shape[:3], -1)[..., : layout.shape[3]]


def _fill(lanes: Tensor, layout: Lanes, codec: LaneCodec, rows_of: RowsOf, padding: int) -> None:
    experts, parts, n_out, k_in = layout.shape
    blocks, block_k = layout.k_blocks, layout.block_k
    for some, span in row_batches(experts, n_out, parts * blocks * block_k, lanes.device):
        padded = functional.pad(rows_of(some, span), (0, blocks * block_k - k_in), value=padding)
        quarters = padded.unflatten(-1, (blocks, 4, block_k // 4)).to(torch.int32)
        lanes[some, :, :, span] = codec.pack(quarters).to(torch.int16).transpose(2, 3)


def _pack_e2m1(codes: Tensor) -> Tensor:
    a, b, c, d = codes.unbind(-2)
    lanes = ((a & 8) << 12) | ((a & 7) << 6)
    lanes = lanes | ((b & 8) << 9) | ((b & 7) << 3)
    lanes = lanes | ((c & 8) << 6) | (c & 7)
    return lanes | ((d & 8) << 11) | ((d & 4) << 11) | ((d & 3) << 10)


def _unpack_e2m1(lanes: Tensor) -> Tensor:
    a = (lanes >> 12 & 8) | (lanes >> 6 & 7)
    b = (lanes >> 9 & 8) | (lanes >> 3 & 7)
    c = (lanes >> 6 & 8) | (lanes & 7)
    d = (lanes >> 11 & 8) | (lanes >> 11 & 4) | (lanes >> 10 & 3)
    return torch.stack((a, b, c, d), dim=-2)


def _pack_e2m1_half(codes: Tensor) -> Tensor:
    a, b, c, d = codes.unbind(-2)
    signs = ((a & 8) << 12) | ((b & 8) << 9) | ((c & 8) << 11) | ((d & 8) << 10)
    return signs | ((a & 7) << 9) | ((b & 7) << 6) | ((c & 7) << 3) | (d & 7)


def _unpack_e2m1_half(lanes: Tensor) -> Tensor:
    a = (lanes >> 12 & 8) | (lanes >> 9 & 7)
    b = (lanes >> 9 & 8) | (lanes >> 6 & 7)
    c = (lanes >> 11 & 8) | (lanes >> 3 & 7)
    d = (lanes >> 10 & 8) | (lanes & 7)
    return torch.stack((a, b, c, d), dim=-2)


def _pack_bytes(codes: Tensor) -> Tensor:
    a, b, c, d = codes.unbind(-2)
    return torch.cat((a | (b << 8), c | (d << 8)), dim=-1)


def _unpack_bytes(lanes: Tensor) -> Tensor:
    first, second = lanes.chunk(2, dim=-1)
    return torch.stack((first & 255, first >> 8, second & 255, second >> 8), dim=-2)


def _pack_int4(codes: Tensor) -> Tensor:
    a, b, c, d = codes.unbind(-2)
    return a | (b << 4) | (c << 8) | (d << 12)


def _unpack_int4(lanes: Tensor) -> Tensor:
    return torch.stack([lanes >> shift & 15 for shift in (0, 4, 8, 12)], dim=-2)


E2M1 = LaneCodec(_pack_e2m1, _unpack_e2m1)  # decoded to bfloat16
E2M1_HALF = LaneCodec(_pack_e2m1_half, _unpack_e2m1_half)  # decoded to float16
EIGHT_BITS = LaneCodec(_pack_bytes, _unpack_bytes)
INT4 = LaneCodec(_pack_int4, _unpack_int4)


def interleave_bytes(codes: Tensor, layout: Lanes) -> Tensor:
    """Return the lanes of eight-bit codes ``[E, P, N, K]``."""
    return interleave(
        layout, EIGHT_BITS, partial(_codes_of, codes.view(torch.uint8), layout.shape[3]), device=codes.device
    )


def _codes_of(codes: Tensor, columns: int, experts: slice, span: slice) -> Tensor:
    return codes[experts, :, span, :columns]
