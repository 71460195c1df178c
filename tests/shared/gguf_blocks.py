"""The half-precision numbers of GGUF blocks, written where each kind has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from collegium.formats.gguf import KINDS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["write_half"]


def write_half(title: str, blocks: Tensor, index: int, half: Tensor) -> None:
    """Write float16 ``half [...]`` as number ``index`` of blocks ``[..., bytes]`` of the kind ``title``, in place."""
    kind = KINDS[title]
    raw = half.half().expand(blocks.shape[:-1]).unsqueeze(-1).contiguous().view(torch.uint8)
    if kind.read_half is None:
        blocks[..., kind.halves[index] : kind.halves[index] + 2] = raw
        return
    # IQ1_M: four bits in the upper bits of every second byte of the last eight.
    four = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
    blocks[..., 49::2] = (blocks[..., 49::2] & 15) | (four << 4)
