"""Four-bit weights of bitsandbytes, codes that look numbers up, for 16-bit tokens.

Shape letters: E experts, P parts, N output rows, K input columns, B K blocks.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....formats.bnb4 import Bnb4
from ....formats.codecs import unpack_nibbles
from ..layout import LANES, Lanes
from ..matrix import PackedMatrix
from .common import Unpacked, from_scale_words
from .interleave import INT4, deinterleave, interleave

__all__ = ["pack_bnb4", "unpack_bnb4"]


def pack_bnb4(payload: Bnb4, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Interleave codes; a number of the table is the sum of two operands: 16 bits of it, 22 with float16 tokens (half).

    A group's float32 product is multiplied by its scale, which is exact.
    """
    experts, parts, n_out, columns = payload.shape
    size = payload.group_size
    words = 128 // max(32, min(64, size))
    layout = replace(LANES["table"].of(payload.shape), words=words)
    scale = payload.scales.new_empty((experts, parts, layout.k_blocks, words, n_out))
    groups = torch.arange(layout.k_blocks * words, device=scale.device) * (128 // words) // size
    for scales, target in zip(payload.scales, scale, strict=True):
        by_word = scales.index_select(-1, groups.clamp(max=scales.shape[-1] - 1))
        target.copy_(by_word.unflatten(-1, (layout.k_blocks, words)).permute(0, 2, 3, 1))
    first = payload.table.to(torch.float16 if half else torch.bfloat16)
    terms = torch.stack(((payload.table - first.float()).to(first.dtype), first), dim=-1)
    values = interleave(layout, INT4, partial(_rows_of, payload.codes, columns), device=payload.codes.device)
    table = terms.view(torch.int32)[..., 0]
    return PackedMatrix(layout=layout, values=values, scale=scale, row_scale=table, bias=bias)


def unpack_bnb4(packed: PackedMatrix, *, half: bool = False) -> Unpacked:
    """Return codes, the scales of each word's columns, and the table of numbers; half: as in ``pack_bnb4``."""
    layout = packed.layout
    assert isinstance(layout, Lanes)
    assert packed.scale is not None
    assert packed.row_scale is not None
    terms = packed.row_scale.contiguous().view(torch.float16 if half else torch.bfloat16).unflatten(-1, (16, 2))
    return Unpacked(
        codes=deinterleave(packed.values, layout, INT4),
        scales=from_scale_words(packed.scale, torch.float32).double(),
        group=layout.block_k // layout.words,
        numbers=terms.double().sum(-1),
    )


def _rows_of(codes: Tensor, columns: int, experts: slice, span: slice) -> Tensor:
    return unpack_nibbles(codes[experts, :, span])[..., :columns]
