"""E4M3 weights with a scale for each row or block: as they are for E4M3 tokens, interleaved for 16-bit tokens."""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ....errors import InputError
from ....formats.fp8_block import Fp8Block
from ....formats.fp8_channel import Fp8Channel
from ....formats.fp8_tensor import Fp8Tensor
from ....formats.mxfp8 import MxFp8
from ....kernels.enums import GROUP_SCALE
from ..layout import LANES, ROWS, Lanes, Rows
from ..matrix import PackedMatrix
from .common import Unpacked, from_scale_words
from .interleave import EIGHT_BITS, deinterleave, interleave_bytes
from .mx import pack_mx

__all__ = ["pack_fp8_block", "pack_fp8_rows", "unpack_fp8"]

_K_BLOCK = 128  # columns of a step of the K loop
_HALF_SPREAD = 22  # powers of two between scales of a row that float16 holds without rounding


def pack_fp8_block(payload: Fp8Block, bias: Tensor | None, *, native: bool = False, half: bool = False) -> PackedMatrix:
    """Take codes as E4M3 operands (native), otherwise interleave them to be decoded to 16 bits (half: float16).

    The scales of blocks of whole multiples of 128 x 128 are repeated for 128 x 128. Those of other blocks are repeated
    for each row, and where they are powers of two, codes that are decoded get them as MXFP8 does. Raises InputError for
    blocks that are not multiples of 32 columns.
    """
    rows, columns = payload.block
    if columns % 32:
        raise InputError(
            f"fp8_block: blocks of {payload.block} found, this kernel takes multiples of 32 columns; use the reference "
            "kernel for them"
        )
    if rows % 128 or columns % 128:
        return _pack_small_blocks(payload, bias, native=native, half=half)
    layout = (ROWS if native else LANES)["fp8_block"].of(payload.shape)
    scales = payload.scales.float().repeat_interleave(rows // 128, dim=2).repeat_interleave(columns // 128, dim=3)
    scales = scales[:, :, : layout.scale_rows, : layout.k_blocks].contiguous()
    return PackedMatrix(layout=layout, values=_values(payload.codes, layout), scale=scales, bias=bias)


def _pack_small_blocks(payload: Fp8Block, bias: Tensor | None, *, native: bool, half: bool) -> PackedMatrix:
    """Take blocks of any rows and a multiple of 32 columns: a scale for each row and group of columns."""
    rows, columns = payload.block
    text = f"FP8 in blocks of {rows} x {columns}"
    powers = None if native else _e8m0_bytes(payload.scales, half=half)
    if powers is not None:
        as_mx = MxFp8(shape=payload.shape, codes=payload.codes, scales=_for_rows(powers, payload, 32))
        return replace(pack_mx(as_mx, bias, half=half), report=f"{text}, E8M0 scales of 32 columns")
    group = math.gcd(columns, _K_BLOCK)
    layout = (ROWS if native else LANES)["fp8_groups"].of(payload.shape)
    if native:
        # The codes of one scale are one product.
        layout = replace(layout, block_k=group)
    else:
        layout = replace(layout, words=_K_BLOCK // group, quartered=group < _K_BLOCK)
    scales = _for_rows(payload.scales.float(), payload, group)
    words = functional.pad(scales, (0, layout.k_blocks * layout.words - scales.shape[-1]))
    words = words.unflatten(-1, (layout.k_blocks, layout.words)).permute(0, 1, 3, 4, 2).contiguous()
    report = f"{text}, float32 scales of {group} columns"
    return PackedMatrix(layout=layout, values=_values(payload.codes, layout), scale=words, bias=bias, report=report)


def _e8m0_bytes(scales: Tensor, *, half: bool) -> Tensor | None:
    """Return the E8M0 bytes of float32 ``scales``, 0 for zero; None unless ``pack_mx`` takes them without rounding.

    They are powers of two, and with ``half`` lie within a factor of 2^22.
    """
    bits = scales.float().view(torch.int32)
    exponents = bits >> 23
    used = exponents[exponents > 0]
    spread = int(used.max() - used.min()) if used.numel() else 0
    if bool((bits & 0x7FFFFF).any()) or (half and spread > _HALF_SPREAD):
        return None
    return exponents.to(torch.uint8)


def _for_rows(scales: Tensor, payload: Fp8Block, group: int) -> Tensor:
    """Return ``[E, P, N, ceil(K / group)]``: scales of blocks for each row and ``group`` columns, which divide them."""
    rows, columns = payload.block
    _, _, n_out, k_in = payload.shape
    spread = scales.repeat_interleave(rows, dim=2)[:, :, :n_out].repeat_interleave(columns // group, dim=3)
    return spread[..., : -(-k_in // group)]


def pack_fp8_rows(payload: Fp8Channel | Fp8Tensor, bias: Tensor | None, *, native: bool) -> PackedMatrix:
    """Take or interleave codes like ``pack_fp8_block``; the one scale of a row is applied after the sum."""
    layout = (ROWS if native else LANES)["fp8_rows"].of(payload.shape)
    scale = payload.scale.unsqueeze(-1) if isinstance(payload, Fp8Tensor) else payload.scales
    row_scale = scale.float().expand(payload.shape[:3]).contiguous()
    return PackedMatrix(layout=layout, values=_values(payload.codes, layout), row_scale=row_scale, bias=bias)


def unpack_fp8(packed: PackedMatrix) -> Unpacked:
    """Return codes uint8 and the scales of rows, or of blocks for each row."""
    layout, scales, group = packed.layout, None, packed.layout.block_k
    if isinstance(layout, Lanes):
        codes = deinterleave(packed.values, layout, EIGHT_BITS)
    else:
        codes = packed.values.view(torch.uint8)
    if packed.scale is not None and layout.scale_kind == GROUP_SCALE:
        group //= layout.words
        scales = from_scale_words(packed.scale, torch.float32).double()
    elif packed.scale is not None:
        scales = packed.scale.double().repeat_interleave(layout.scale_block, dim=2)[:, :, : layout.shape[2]]
    row_scale = None if packed.row_scale is None else packed.row_scale.double()
    return Unpacked(codes=codes, scales=scales, group=group, row_scale=row_scale)


def _values(codes: Tensor, layout: Rows | Lanes) -> Tensor:
    """Return codes as they are, or interleaved."""
    return codes.contiguous() if isinstance(layout, Rows) else interleave_bytes(codes, layout)
