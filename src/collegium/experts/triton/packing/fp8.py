"""E4M3 weights with a scale for each row or block: as they are for E4M3 tokens, interleaved for 16-bit tokens."""

from functools import partial

import torch
from torch import Tensor

from ....errors import InputError
from ....formats.fp8_block import Fp8Block
from ....formats.fp8_channel import Fp8Channel
from ....formats.fp8_tensor import Fp8Tensor
from ..layout import LANES, ROWS, Lanes, Rows
from ..matrix import PackedMatrix
from .common import Unpacked
from .interleave import EIGHT_BITS, deinterleave, interleave

__all__ = ["interleave_bytes", "pack_fp8_block", "pack_fp8_rows", "unpack_fp8"]


def pack_fp8_block(payload: Fp8Block, bias: Tensor | None, *, native: bool) -> PackedMatrix:
    """Take codes as E4M3 operands (native), otherwise interleave them to be decoded to 16 bits.

    Blocks must be whole multiples of 128 x 128; their scales are repeated. Raises InputError for other blocks.
    """
    rows, columns = payload.block
    if rows % 128 or columns % 128:
        raise InputError(
            f"fp8_block: blocks of {payload.block} found, this kernel takes multiples of (128, 128); use the "
            "reference kernel for them"
        )
    layout = (ROWS if native else LANES)["fp8_block"].of(payload.shape)
    scales = payload.scales.float().repeat_interleave(rows // 128, dim=2).repeat_interleave(columns // 128, dim=3)
    scales = scales[:, :, : layout.scale_rows, : layout.k_blocks].contiguous()
    return PackedMatrix(layout=layout, values=_values(payload.codes, layout), scale=scales, bias=bias)


def pack_fp8_rows(payload: Fp8Channel | Fp8Tensor, bias: Tensor | None, *, native: bool) -> PackedMatrix:
    """Take or interleave codes like ``pack_fp8_block``; the one scale of a row is applied after the sum."""
    layout = (ROWS if native else LANES)["fp8_rows"].of(payload.shape)
    scale = payload.scale.unsqueeze(-1) if isinstance(payload, Fp8Tensor) else payload.scales
    row_scale = scale.float().expand(payload.shape[:3]).contiguous()
    return PackedMatrix(layout=layout, values=_values(payload.codes, layout), row_scale=row_scale, bias=bias)


def unpack_fp8(packed: PackedMatrix) -> Unpacked:
    """Return codes uint8 and the scales of rows, or of blocks for each row."""
    layout, scales = packed.layout, None
    if isinstance(layout, Lanes):
        codes = deinterleave(packed.values, layout, EIGHT_BITS)
    else:
        codes = packed.values.view(torch.uint8)
    if packed.scale is not None:
        scales = packed.scale.double().repeat_interleave(layout.scale_block, dim=2)[:, :, : layout.shape[2]]
    row_scale = None if packed.row_scale is None else packed.row_scale.double()
    return Unpacked(codes=codes, scales=scales, group=layout.block_k, row_scale=row_scale)


def _values(codes: Tensor, layout: Rows | Lanes) -> Tensor:
    """Return codes as they are, or interleaved."""
    return codes.contiguous() if isinstance(layout, Rows) else interleave_bytes(codes, layout)


def interleave_bytes(codes: Tensor, layout: Lanes) -> Tensor:
    """Return the lanes of eight-bit codes ``[E, P, N, K]``."""
    return interleave(
        layout, EIGHT_BITS, partial(_rows_of, codes.view(torch.uint8), layout.shape[3]), device=codes.device
    )


def _rows_of(codes: Tensor, columns: int, experts: slice, span: slice) -> Tensor:
    return codes[experts, :, span, :columns]
