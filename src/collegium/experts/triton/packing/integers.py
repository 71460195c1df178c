"""INT4 and INT8 weights with scales for groups of columns (GPTQ, AWQ, compressed-tensors), for 16-bit tokens.

Shape letters: E experts, P parts, N output rows, K input columns, B K blocks, G groups.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....errors import InputError
from ....formats.codecs import unpack_nibbles
from ....formats.int4_group import Int4Group
from ....formats.int_affine import Int4Affine, Int4Ordered, Int8Affine, Int8Ordered
from ....kernels import enums
from ..layout import LANES, Lanes
from ..matrix import PackedMatrix
from .common import Unpacked, from_scale_words
from .interleave import EIGHT_BITS, INT4, deinterleave, interleave
from .units import flush_codes, flush_scales

__all__ = ["Integers", "column_order", "int4_scales", "pack_int", "scales_by_word", "unpack_int"]

Integers = Int4Group | Int4Affine | Int8Affine | Int4Ordered | Int8Ordered


def pack_int(payload: Integers, bias: Tensor | None) -> PackedMatrix:
    """Interleave codes; sums are in units of a group's scale, which is exact (``flush_scales``).

    A zero point goes into the low byte of its scale, which a 16-bit number leaves free as a float32. Raises InputError
    when a group is no multiple of 32 columns (and not the whole row), and for zero points with float32 scales.
    """
    words, dtype = int4_scales(payload)
    order = column_order(payload) if isinstance(payload, Int4Ordered | Int8Ordered) else None
    bits = 4 if isinstance(payload, Int4Group) else payload.bits
    zeros = _zero_points(payload, bits)
    if zeros is not None:
        words, dtype = 4 if words > 1 else 1, torch.float32
        kind = enums.ZERO_SCALE
    else:
        kind = enums.PAIR_SCALE if words == 2 else enums.GROUP_SCALE
    layout = replace(LANES[f"int{bits}"].of(payload.shape), scale_kind=kind, words=words, quartered=words > 1)
    rows = _Rows(payload=payload, bits=bits, zeros=zeros, order=order)
    values = interleave(layout, EIGHT_BITS if bits == 8 else INT4, rows.of, device=payload.codes.device, padding=8)
    scale = _scales(payload, layout, zeros, dtype)
    return PackedMatrix(layout=layout, values=values, scale=scale, bias=bias, order=order)


def unpack_int(packed: PackedMatrix) -> Unpacked:
    """Return codes in the order of the payload's columns, and the scales of each word's columns.

    The groups of a payload with an order of columns are those of the packed order: scales and zeros follow
    ``packed.order``, codes do not.
    """
    layout, scale = packed.layout, packed.scale
    assert isinstance(layout, Lanes)
    assert scale is not None
    eight = layout.weight == enums.INT8_LANES
    codes = deinterleave(packed.values, layout, EIGHT_BITS if eight else INT4)
    group = layout.block_k // (4 if layout.scale_kind == enums.PAIR_SCALE else layout.words)
    zeros = None
    if layout.scale_kind == enums.PAIR_SCALE:
        scales = from_scale_words(scale, torch.bfloat16)
    elif layout.scale_kind == enums.ZERO_SCALE:
        words = from_scale_words(scale, torch.int32)
        scales = (words & ~255).view(torch.float32)
        zeros = words & 255
    else:
        scales = from_scale_words(scale, torch.float32)
    if zeros is None:
        zeros = torch.full(scales.shape, 128 if eight else 8, device=codes.device)
    if packed.order is not None:
        order = packed.order.long()[:, None, None].expand_as(codes)
        codes = torch.empty_like(codes).scatter_(-1, order, codes)
    return Unpacked(codes=codes, scales=scales.double(), group=group, zeros=zeros)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Rows of codes of a payload as they are packed: in order, without those of scales that are no unit."""

    payload: Integers
    bits: int
    zeros: Tensor | None
    order: Tensor | None

    def of(self, experts: slice, span: slice) -> Tensor:
        """Return codes uint8 ``[e, P, n, K]``."""
        payload = self.payload
        stored = payload.codes[experts, :, span]
        codes = (unpack_nibbles(stored) if self.bits == 4 else stored.contiguous())[..., : payload.shape[3]]
        if self.order is not None:
            orders = self.order[experts].long()
            pairs = zip(codes, orders, strict=True)
            codes = torch.stack([matrix.index_select(-1, order) for matrix, order in pairs])
        zero = 1 << (self.bits - 1) if self.zeros is None else self.zeros[experts, :, span]
        return flush_codes(codes, payload.scales[experts, :, span], payload.group_size, zero)


def _zero_points(payload: Integers, bits: int) -> Tensor | None:
    """Return the zero points that scales carry, None where all of them are the middle of the codes."""
    if isinstance(payload, Int4Group):
        return None
    if payload.scales.dtype != torch.float32:
        return payload.zeros
    # By dtype, not by whether a zero point differs: all ranks of a layer pack alike.
    if bool((payload.zeros != 1 << (bits - 1)).any()):
        raise InputError(
            f"{payload.name}: zero points with float32 scales found, this kernel takes them with scales of 16 "
            "bits; use the reference kernel for them"
        )
    return None


def _scales(payload: Integers, layout: Lanes, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the scale words ``[E, P, B, words, N]``."""
    experts, parts, n_out, _ = payload.shape
    shape = (experts, parts, layout.k_blocks, layout.words, n_out)
    scale = torch.empty(shape, dtype=dtype, device=payload.codes.device)
    for expert, target in enumerate(scale):
        flushed = flush_scales(payload.scales[expert])
        target.copy_(scales_by_word(payload, flushed, layout.words, dtype).permute(0, 2, 3, 1))
        if zeros is not None:
            bits = target.view(torch.int32)
            bits |= scales_by_word(payload, zeros[expert], layout.words, torch.int32).permute(0, 2, 3, 1)
    return scale if zeros is None else scale.view(torch.int32)


def column_order(payload: Int4Ordered | Int8Ordered) -> Tensor:
    """Return the column of ``payload [E, P, N, K]`` in each place once groups are contiguous, int32 ``[E, K]``.

    Raises InputError for groups of other sizes, and for parts in different orders.
    """
    order = payload.group_of.argsort(dim=-1, stable=True)
    groups = payload.group_of.gather(-1, order)
    place = torch.arange(order.shape[-1], device=order.device)
    if bool((groups != place // payload.group_size).any()) or bool((order != order[:, :1]).any()):
        raise InputError(
            f"{payload.name}: found groups of other sizes than {payload.group_size}, or gate and up in different "
            "orders; this kernel takes whole matrices in one order, use the reference kernel for others"
        )
    return order[:, 0].to(torch.int32).contiguous()


def int4_scales(payload: Integers) -> tuple[int, torch.dtype]:
    """Return how the scales of a row and K block of 128 columns are stored: how many words, and their dtype.

    One float32, or one for each quarter of the block: four float32, or two int32 of two bfloat16 scales each. Raises
    InputError when a group is no multiple of 32 columns (and not the whole row).
    """
    size, columns = payload.group_size, payload.shape[-1]
    if size % 32 and size < columns:
        raise InputError(
            f"{payload.name}: groups of {size} columns found, this kernel takes multiples of 32 or whole rows; use the "
            "reference kernel for them"
        )
    if size % 128 == 0 or size >= columns:
        return 1, torch.float32
    pairs = payload.scales.dtype == torch.bfloat16 and not isinstance(payload, Int8Affine | Int8Ordered)
    return (2, torch.int32) if pairs else (4, torch.float32)


def scales_by_word(payload: Integers, scales: Tensor, words: int, dtype: torch.dtype) -> Tensor:
    """Return ``[..., B, words]`` for rows ``[..., G]`` of the payload's scales, stored as in ``int4_scales``."""
    blocks = -(-payload.shape[-1] // 128)
    per_block = 1 if words == 1 else 4
    group = torch.arange(blocks * per_block, device=scales.device) * (128 // per_block) // payload.group_size
    by_quarter = scales.index_select(-1, group.clamp(max=scales.shape[-1] - 1))
    by_word = by_quarter.contiguous().view(torch.int32) if words == 2 else by_quarter.to(dtype)
    return by_word.unflatten(-1, (blocks, words))
