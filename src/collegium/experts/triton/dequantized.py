"""Packed weights of some experts at a time as 16-bit numbers, for large batches: decoded once, not for each tile.

Shape letters: E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs, G groups of columns.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ...runtime.launch import launch
from ...runtime.memory import Memory
from .grouped import TileList, tile_list
from .matrix import PackedMatrix

__all__ = ["dequantize_experts", "dequantized_groups"]

_TILE = 64  # weight rows of a program


def dequantized_groups(
    matrix: PackedMatrix, *, offsets: Tensor, tiles: TileList, rows: int, room: Tensor | None, memory: Memory | None
) -> Iterator[tuple[PackedMatrix, Tensor, TileList]]:
    """Yield a matrix to multiply, where its experts' rows begin, and their tiles, until all experts have been there.

    Weights that are decoded appear some experts at a time in ``room``, int8 of ``Layout.expanded_bytes``, where each
    turn overwrites the one before on the current stream; others (None) as they are. offsets ``[E+1]``, tiles: of all
    experts. rows: in all. memory: where the tile lists of some experts come from.
    """
    layout, experts = matrix.layout, matrix.layout.shape[0]
    turn = experts if room is None else layout.turn
    for start in range(0, experts, turn):
        here = slice(start, min(start + turn, experts))
        own = offsets[start : here.stop + 1]
        listed = tiles if turn == experts else tile_list(own, rows, tiles.tile, memory)
        made = (
            matrix if room is None else dequantize_experts(matrix.map_tensors(lambda tensor, at=here: tensor[at]), room)
        )
        yield made, own, listed


def dequantize_experts(matrix: PackedMatrix, room: Tensor) -> PackedMatrix:
    """Return ``matrix`` with its numbers and factors in ``room``."""
    from ...kernels.dequantize import expand_kernel

    layout, made = matrix.layout, matrix.layout.expanded
    experts, parts, n_out, k_in = layout.shape
    constants = {"WEIGHT": layout.weight, "SCALE": layout.scale_kind, "WORDS": max(1, layout.words)}
    constants |= {"K_BLOCKS": layout.k_blocks, "BLOCK_K": layout.block_k, "BLOCK_N": _TILE}
    constants |= {"HALF": layout.row_dtype == torch.float16, "ASM": room.is_cuda}
    room_of_numbers = experts * layout.expanded_sizes[0]
    values = room[:room_of_numbers].view(made.stored).view(made.values_shape)
    shape = experts, parts, made.k_blocks, made.words, n_out
    factors = room[room_of_numbers:][: 4 * prod(shape)].view(torch.float32).view(shape)
    row_tiles = -(-n_out // _TILE)
    args = (
        matrix.values, *matrix.pointers[1:3], values, factors, n_out, k_in, made.k_blocks, row_tiles, layout.scale_rows,
    )  # fmt: skip
    launch(expand_kernel, (row_tiles * layout.k_blocks, experts * parts), args, constants, num_warps=4)
    return replace(matrix, layout=made, values=values, scale=factors if made.words else None)
