"""Packed weights of some experts at a time as 16-bit numbers, for large batches: decoded once, not for each tile.

Shape letters: E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs, G groups of columns.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.launch import launch
from ...runtime.memory import Memory
from .grouped import TileList, tile_list
from .matrix import PackedMatrix

__all__ = ["ExpertGroup", "dequantize_experts", "dequantized_groups"]

_TILE = 64  # weight rows of a program


class ExpertGroup(NamedTuple):
    """Consecutive experts to multiply: their weights, where their rows begin ``[experts + 1]``, and their tiles."""

    matrix: PackedMatrix
    offsets: Tensor
    tiles: TileList


def dequantized_groups(
    matrix: PackedMatrix, buffer: Tensor | None, *, offsets: Tensor, tiles: TileList, rows: int, memory: Memory | None
) -> Iterator[ExpertGroup]:
    """Yield all experts of ``matrix``, some at a time.

    buffer: int8, of at least ``Layout.dequantized_bytes`` bytes, where decoded weights appear; each group overwrites
    the previous one on the current stream. Weights that are operands as they are (0 bytes) are one group. offsets
    ``[E+1]``, tiles: of all experts. rows: in all. memory: where the tile lists of groups come from.
    """
    layout, experts = matrix.layout, matrix.layout.shape[0]
    if buffer is None or not layout.dequantized_bytes:
        yield ExpertGroup(matrix, offsets, tiles)
        return
    size = layout.experts_per_group
    for start in range(0, experts, size):
        stop = min(start + size, experts)
        group_offsets = offsets[start : stop + 1]
        group_tiles = tiles if size == experts else tile_list(group_offsets, rows, tiles.tile, memory)
        group = matrix.map_tensors(itemgetter(slice(start, stop)))
        yield ExpertGroup(dequantize_experts(group, buffer), group_offsets, group_tiles)


def dequantize_experts(matrix: PackedMatrix, buffer: Tensor) -> PackedMatrix:
    """Return ``matrix`` with its numbers and factors in ``buffer``."""
    from ...kernels.dequantize import dequantize_kernel

    layout = matrix.layout
    dequantized = layout.dequantized
    experts, parts, n_out, k_in = layout.shape
    values_bytes = experts * layout.dequantized_sizes[0]
    values = buffer[:values_bytes].view(dequantized.stored).view(dequantized.values_shape)
    shape = (experts, parts, dequantized.k_blocks, dequantized.words, n_out)
    factors = buffer[values_bytes:][: 4 * prod(shape)].view(torch.float32).view(shape)
    row_tiles = -(-n_out // _TILE)
    args = (
        matrix.values,
        *matrix.pointers[1:3],
        values,
        factors,
        n_out,
        k_in,
        dequantized.k_blocks,
        row_tiles,
        layout.scale_rows,
    )
    constants = {
        "WEIGHT": layout.weight,
        "SCALE": layout.scale_kind,
        "WORDS": max(1, layout.words),
        "K_BLOCKS": layout.k_blocks,
        "BLOCK_K": layout.block_k,
        "BLOCK_N": _TILE,
        "HALF": layout.row_dtype == torch.float16,
        "ASM": buffer.is_cuda,
    }
    launch(dequantize_kernel, (row_tiles * layout.k_blocks, experts * parts), args, constants, num_warps=4)
    return replace(matrix, layout=dequantized, values=values, scale=factors if dequantized.words else None)
