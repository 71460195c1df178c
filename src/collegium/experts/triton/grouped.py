"""Grouped product over rows in expert order: tile lists, argument checks and the launch.

Shape letters: T tokens, R rows, E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...kernels.enums import FAST_MATH, NO_ACTIVATION
from ...ops.columns import ZeroPointCorrection, halves_and_sums
from ...ops.operand import Operand
from ...ops.permute import tile_count
from ...runtime.launch import launch, power_at_least
from ...runtime.memory import Memory, alloc
from ...types import ACTIVATION_KINDS, ActivationSpec
from .layout import Words
from .matrix import PackedMatrix
from .tiles.problem import TileChoice

__all__ = ["TileList", "activation_bounds", "activation_kind", "grouped_gemm", "rescale", "row_scales", "tile_list"]

_BLOCK_TILES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TileList:
    """expert ``[count]`` int32 (-1: no tile) and first row ``[count]`` int64 of each token tile of ``tile``.

    used: ``[3]`` int32, how many tiles have an expert (they come first), and two zeros for counters. None: not
    counted. top_k: not 0 when nothing is sorted: then expert holds the ids ``[T, top_k]`` of any width and value, and
    row r is assignment r, one tile. early: the tile list was complete before the previous kernel started.
    row_offsets: ``[R]`` int64, where row r is written, in elements from the first of the result (``RemoteOutput``);
    None: at row r.
    """

    expert: Tensor
    row: Tensor
    count: int
    tile: TileChoice
    used: Tensor | None = None
    top_k: int = 0
    early: bool = False
    row_offsets: Tensor | None = None

    def offset_unit(self, n_out: int) -> int:
        """Return a divisor of all row offsets, 0 where rows are written in order."""
        if self.row_offsets is None:
            return 0
        return 16 if n_out % 16 == 0 else 1

    def constants(self, x: Tensor) -> dict[str, Any]:
        """Return the compile-time arguments for the lookup of tiles and the overlap with the previous kernel."""
        overlap = self.tile.overlap and x.is_cuda
        return {"ASM": x.is_cuda, "TOP_K": self.top_k, "EARLY": self.early and overlap, "PDL": overlap}


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
    ``[T, ceil(K / 128)]`` or ``[T, 1]`` for E4M3 rows, or ``[R, ceil(K / 128)]`` from ``transpose_scales`` where
    ``reads_transposed_scales``, with x from ``halves_and_sums`` for weights that rescale rows. tiles: from
    ``tile_list``; when nothing is sorted expert_offsets is not read, and any source means that row r reads x at
    r // top_k. Rows from ``expert_offsets[E]`` on are not written. With ``tiles.row_offsets`` out is ``[any, N]``, and
    rows go to those offsets. Raises InputError for wrong shapes or dtypes.
    """
    _check(x, packed, out, x_scale)
    layout, tile = packed.layout, tiles.tile
    experts, _, n_out, k_in = layout.shape
    unused = packed.values  # for unused pointers, of one dtype and alignment in every batch
    scale, sums = row_scales(x_scale, unused)
    kernel: Any
    if isinstance(layout, Words):
        from ...kernels.w4a8 import w4a8_kernel

        kernel = w4a8_kernel
        scales: tuple[Tensor, ...] = (scale,)
        sizes: tuple[int, ...] = (n_out, x.stride(0), scale.stride(-1), layout.row_tiles)
    else:
        from ...kernels.grouped_gemm import grouped_gemm_kernel

        kernel = grouped_gemm_kernel
        scales = (scale, sums)
        sizes = (n_out, k_in, x.stride(0), *layout.steps, layout.scale_rows)
    args = (
        *(x, *scales, *packed.pointers),
        *(out, tiles.row_offsets, unused if source is None else source),
        *(expert_offsets, tiles.expert, tiles.row),
        *(*sizes, tiles.count, experts),
        *activation_bounds(activation),
    )
    constants = {
        **_common_constants(packed, activation, x_scale, tiles),
        **(_four_bit_constants(tile) if isinstance(layout, Words) else _decoding_constants(packed, tile)),
        "GATHER": source is not None,
        **tiles.constants(x),
    }
    grid = (tiles.count * -(-layout.operand_rows[1] // tile.columns),)
    launch(kernel, grid, args, constants, num_warps=tile.warps, maxnreg=tile.registers or None)
    return out


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


def activation_bounds(activation: ActivationSpec | None) -> tuple[float, ...]:
    """Return the numbers of an activation, in the order of every product's arguments."""
    spec = activation or ActivationSpec()
    gate_bound = spec.beta if spec.kind == "swiglu_oai" else spec.gate_bound
    return float(spec.limit or 0.0), float(spec.alpha), float(gate_bound), float(spec.up_bound)


def activation_kind(activation: ActivationSpec | None) -> int:
    """Return the kernels' number of an activation."""
    if activation is None:
        return NO_ACTIVATION
    return ACTIVATION_KINDS.index(activation.kind) + (FAST_MATH if activation.fast else 0)


def _common_constants(
    packed: PackedMatrix,
    activation: ActivationSpec | None,
    x_scale: Tensor | ZeroPointCorrection | None,
    tiles: TileList,
) -> dict[str, Any]:
    """Return the compile-time arguments of every product."""
    layout, tile = packed.layout, tiles.tile
    return {
        "WEIGHT": layout.weight,
        "BIAS": packed.bias is not None,
        "PARTS": layout.shape[1],
        "KIND": activation_kind(activation),
        "HAS_LIMIT": activation is not None and activation.limit is not None,
        "K_BLOCKS": layout.k_blocks,
        "BLOCK_K": layout.block_k,
        "X_SCALE": _x_scale_layout(x_scale, packed),
        "BLOCK_N": tile.block_n,
        "BLOCK_T": tile.block_t,
        "GROUP_T": tile.group_t,
        "STAGES": tile.stages,
        "DEPTH": tile.depth,
        "NARROW": tile.narrow,
        "PLACED": tiles.offset_unit(layout.shape[2]),
    }


def _four_bit_constants(tile: TileChoice) -> dict[str, Any]:
    """Return the further compile-time arguments of ``w4a8_kernel``."""
    return {"WARPS": tile.warps}


def _decoding_constants(packed: PackedMatrix, tile: TileChoice) -> dict[str, Any]:
    """Return the further compile-time arguments of ``grouped_gemm_kernel``."""
    layout = packed.layout
    return {
        "SCALE": layout.scale_kind,
        "WORDS": max(1, layout.words),
        "ROW_SCALE": packed.row_scale is not None and layout.operands == 1,
        "EVEN_K": layout.shape[3] % layout.block_k == 0,
        "STACKED": tile.stacked,
        "JOINED": tile.joined,
    }


def _x_scale_layout(x_scale: Tensor | ZeroPointCorrection | None, packed: PackedMatrix) -> int:
    """Return the kernels' number of how rows are scaled: not, by group, by row, or by group with scales transposed."""
    if x_scale is None:
        return 0
    scale, _ = row_scales(x_scale, packed.values)
    if scale.shape[1] == 1:
        return 2
    return 1 if scale.stride(1) == 1 else 3


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
            "grouped_gemm: E4M3 rows need x_scale, weights that rescale rows need the result of halves_and_sums, "
            "others need neither"
        )
    if out.dim() != 2 or out.shape[1] != n_out or not out.is_contiguous():
        raise InputError(f"grouped_gemm: out is {tuple(out.shape)}, these weights write contiguous [rows, {n_out}]")
