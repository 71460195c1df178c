"""Grouped product over rows in expert order: tile lists, argument checks and the launch.

Shape letters: T tokens, R rows, E experts, P projections (2: gate and up; 1), N outputs of a projection, K inputs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...kernels.arguments import (
    OperandFormat,
    Projections,
    RowOrder,
    Tile,
    Tokens,
    WeightStrides,
)
from ...kernels.enums import (
    NO_SCALE,
    X_BLOCK_SCALE,
    X_BLOCK_SCALE_TRANSPOSED,
    X_ROW_SCALE,
    X_UNSCALED,
)
from ...ops.activation import activation_bounds, activation_kind
from ...ops.columns import ZeroPointCorrection, halves_and_sums
from ...ops.operand import Operand
from ...ops.permute import tile_count
from ...runtime.launch import launch, power_at_least
from ...runtime.memory import Memory, alloc
from ...types import ActivationSpec
from .layout import Layout, Words
from .low_rank import LowRankRows
from .matrix import PackedMatrix
from .tiles.problem import TileChoice

__all__ = [
    "TileList",
    "grouped_gemm",
    "kernel_tile",
    "operand_format",
    "projections",
    "rescale",
    "row_scales",
    "tile_list",
]

_BLOCK_TILES = 64


class _Launch(NamedTuple):
    """A product kernel, and the arguments that only it has: strides of the weights, and sizes of a matrix."""

    kernel: Any
    strides: tuple[WeightStrides, ...]
    sizes: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileList:
    """expert ``[count]`` int32 (-1: no tile) and first row ``[count]`` int64 of each token tile of ``tile``.

    used: ``[3]`` int32, how many tiles have an expert (they come first), and two zeros for counters. None: not
    counted. top_k: not 0 when nothing is sorted: then expert holds the ids ``[T, top_k]`` of any width and value, and
    row r is assignment r, one tile. early: the tile list was complete before the previous kernel started.
    row_offsets: ``[R]`` int64, where row r is written, in elements from the first of the result (``RemoteOutput``);
    None: at row r. low_rank: changes of rows with adapters, added before the activation.
    """

    expert: Tensor
    row: Tensor
    count: int
    tile: TileChoice
    used: Tensor | None = None
    top_k: int = 0
    early: bool = False
    row_offsets: Tensor | None = None
    low_rank: LowRankRows | None = None

    def offset_unit(self, n_out: int) -> int:
        """Return a divisor of all row offsets, 0 where rows are written in order."""
        if self.row_offsets is None:
            return 0
        return 16 if n_out % 16 == 0 else 1

    def constants(self, x: Tensor) -> dict[str, Any]:
        """Return the compile-time arguments for the machine and the overlap with the previous kernel."""
        overlap = self.tile.overlap and x.is_cuda
        return {"ASM": x.is_cuda, "EARLY": self.early and overlap, "PDL": overlap}


def tile_list(expert_offsets: Tensor, rows: int, tile: TileChoice, memory: Memory | None = None) -> TileList:
    """List the token tiles of ``expert_offsets [E+1]`` int64, on its device and without waiting for it."""
    experts, device = expert_offsets.numel() - 1, expert_offsets.device
    count = tile_count(rows, experts, tile.block_t)
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ...kernels.tiles import tile_list_kernel

    expert = alloc(memory, "expert", (count,), torch.int32, device)
    used = alloc(memory, "used", (3,), torch.int32, device)
    row = alloc(memory, "row", (count,), torch.int64, device)
    constants = {"BLOCK_T": tile.block_t, "BLOCK_E": power_at_least(experts, 16), "BLOCK_TILES": _BLOCK_TILES}
    grid = (-(-count // _BLOCK_TILES),)
    launch(tile_list_kernel, grid, (expert_offsets, expert, row, used, experts, count), constants)
    return TileList(expert=expert, row=row, used=used, count=count, tile=tile)


def grouped_gemm(
    x: Tensor,
    packed: PackedMatrix,
    expert_offsets: Tensor,
    tiles: TileList,
    out: Tensor,
    *,
    source: Tensor | None = None,
    x_scale: Tensor | ZeroPointCorrection | None = None,
    activation: ActivationSpec | None = None,
) -> Tensor:
    """Write ``out [R, N]`` and return it: row r of expert e is ``activation(x[source[r]] @ weight[e].T + bias[e])``.

    x: ``[T, K]`` of the operand dtype, read at ``source [R]`` int64, or row by row without it. x_scale: float32
    ``[T, ceil(K / 128)]`` or ``[T, 1]`` for quantised rows, or ``[R, ceil(K / 128)]`` from ``transpose_scales`` where
    ``reads_transposed_scales``, with x from ``halves_and_sums`` for weights that rescale rows. tiles: from
    ``tile_list``; when nothing is sorted expert_offsets is not read, and any source means that row r reads x at
    r // top_k. Rows from ``expert_offsets[E]`` on are not written. With ``tiles.row_offsets`` out is ``[any, N]``, and
    rows go to those offsets. Raises InputError for wrong shapes or dtypes.
    """
    _check(x, packed, out, x_scale)
    unused = packed.values  # for unused pointers, of one dtype and alignment in every batch
    scale, sums = row_scales(x_scale, unused)
    tokens = Tokens(x, scale, sums, x.stride(0), scale.stride(-1))
    rows = (out, tiles.row_offsets, unused if source is None else source)
    tile_lists = (expert_offsets, tiles.expert, tiles.row)
    layout = packed.layout
    kernel, strides, sizes = _four_bit_launch(layout) if isinstance(layout, Words) else _decoding_launch(layout)
    bounds = activation_bounds(activation)
    counts = (*sizes, tiles.count, layout.shape[0])
    low_rank = tiles.low_rank
    adapters = None if low_rank is None else low_rank.rows
    args = (tokens, packed.pointers, *strides, bounds, adapters, *rows, *tile_lists, *counts)
    tile = tiles.tile
    constants = {
        "FORMAT": operand_format(packed, _x_scale_layout(x_scale, packed)),
        "PROJ": projections(packed, activation, low_rank),
        "TILE": kernel_tile(tile),
        "ROWS": RowOrder(source is not None, tiles.top_k, tiles.offset_unit(layout.shape[2])),
        **tiles.constants(x),
    }
    grid = (tiles.count * -(-layout.operand_rows[1] // tile.columns),)
    launch(kernel, grid, args, constants, num_warps=tile.warps, maxnreg=tile.registers or None)
    return out


def _decoding_launch(layout: Layout) -> _Launch:
    from ...kernels.grouped_gemm import grouped_gemm_kernel

    _, _, n_out, k_in = layout.shape
    return _Launch(grouped_gemm_kernel, (WeightStrides(*layout.steps, layout.scale_rows),), (n_out, k_in))


def _four_bit_launch(layout: Words) -> _Launch:
    from ...kernels.w4a8 import w4a8_kernel

    return _Launch(w4a8_kernel, (), (layout.shape[2], layout.row_tiles))


def operand_format(packed: PackedMatrix, x_scale: int) -> OperandFormat:
    """Return the kernels' description of the weights, and of rows with the scales ``x_scale``."""
    layout = packed.layout
    return OperandFormat(
        weight=layout.weight,
        scale=NO_SCALE if isinstance(layout, Words) else layout.scale_kind,
        words=1 if isinstance(layout, Words) else max(1, layout.words),
        x_scale=x_scale,
        row_scale=packed.row_scale is not None and layout.operands == 1,
        bias=packed.bias is not None,
        k_blocks=layout.k_blocks,
        block_k=layout.block_k,
        even_k=layout.shape[3] % layout.block_k == 0,
    )


def projections(
    packed: PackedMatrix, activation: ActivationSpec | None, low_rank: LowRankRows | None = None
) -> Projections:
    """Return the kernels' description of what is computed. low_rank: of rows with adapters."""
    return Projections(
        count=packed.layout.shape[1],
        activation=activation_kind(activation),
        has_limit=activation is not None and activation.limit is not None,
        adapter_rank=0 if low_rank is None else low_rank.rank,
        stored_changes=low_rank is not None and low_rank.changes,
    )


def kernel_tile(tile: TileChoice) -> Tile:
    """Return the kernels' description of a tile."""
    return Tile(
        block_n=tile.block_n,
        block_t=tile.block_t,
        group_t=tile.group_t,
        narrow=tile.narrow,
        depth=tile.depth,
        stages=tile.stages,
        interleave_gate_up=tile.interleave_gate_up,
        fuse_k_block=tile.fuse_k_block,
        warps=tile.warps,
    )


def row_scales(x_scale: Tensor | ZeroPointCorrection | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales of rows and sums of their columns, ``unused`` in place of missing ones."""
    if isinstance(x_scale, ZeroPointCorrection):
        return x_scale
    return (unused if x_scale is None else x_scale), unused


def rescale(
    rows: Operand, matrix: PackedMatrix, used: Tensor | None, memory: Memory | None
) -> tuple[Tensor, Tensor | ZeroPointCorrection | None]:
    """Return an operand in float16 over powers of two, with sums of its columns, where the weights need that."""
    return halves_and_sums(rows[0], used=used, memory=memory) if matrix.layout.rescaled else rows


def _x_scale_layout(x_scale: Tensor | ZeroPointCorrection | None, packed: PackedMatrix) -> int:
    """Return the kernels' number of how rows are scaled."""
    if x_scale is None:
        return X_UNSCALED
    scale, _ = row_scales(x_scale, packed.values)
    if scale.shape[1] == 1:
        return X_ROW_SCALE
    return X_BLOCK_SCALE if scale.stride(1) == 1 else X_BLOCK_SCALE_TRANSPOSED


def _check(x: Tensor, packed: PackedMatrix, out: Tensor, x_scale: Tensor | ZeroPointCorrection | None) -> None:
    layout = packed.layout
    n_out, columns = layout.shape[2], layout.x_columns
    if x.dim() != 2 or x.shape[1] != columns or x.stride(1) != 1:
        raise InputError(
            f"grouped_gemm: x is {tuple(x.shape)} with strides {x.stride()}, these weights need [rows, {columns}] with "
            "dense rows; call contiguous() first"
        )
    if x.dtype != layout.row_dtype:
        raise InputError(f"grouped_gemm: x is {x.dtype}, these weights multiply {layout.row_dtype}; convert x")
    corrected = isinstance(x_scale, ZeroPointCorrection)
    needs_scale = layout.scaled_rows or layout.rescaled
    if corrected != layout.rescaled or (x_scale is not None) != needs_scale:
        raise InputError(
            "grouped_gemm: quantised rows need x_scale, weights that rescale rows need the result of halves_and_sums, "
            "others need neither"
        )
    if out.dim() != 2 or out.shape[1] != n_out or not out.is_contiguous():
        raise InputError(f"grouped_gemm: out is {tuple(out.shape)}, these weights write contiguous [rows, {n_out}]")
