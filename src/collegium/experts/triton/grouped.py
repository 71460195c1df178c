"""Grouped product over rows packed by expert: checks, launch, and the two products of a batch.

Shape letters: T tokens, R rows, E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...kernels.enums import FAST_MATH, NO_ACTIVATION
from ...ops.columns import ZeroPointCorrection
from ...ops.permute import tile_count
from ...runtime.launch import launch, power_at_least
from ...runtime.memory import Memory, alloc
from ...types import ACTIVATION_KINDS, ActivationSpec
from .layout import Words
from .matrix import PackedMatrix
from .tiles.problem import TileChoice

__all__ = ["TileList", "bounds_of", "constants_of", "grouped_gemm", "kind_of", "scales_of", "tile_list"]

_BLOCK_TILES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TileList:
    """expert ``[count]`` int32 (-1: no tile) and first row ``[count]`` int64 of each token tile of ``tile``.

    used: ``[3]`` int32, how many tiles have an expert, which come first, and two zeros to count with. None: not
    counted. top_k: not 0 when nothing is sorted: then expert holds the ids ``[T, top_k]`` of any width and value, and
    row r is assignment r, one tile. early: the tile list was complete before the previous kernel started.
    places: ``[R]`` int64, where row r is written, in elements from the first of the result, as ``Back`` says; None: r.
    """

    expert: Tensor
    row: Tensor
    count: int
    tile: TileChoice
    used: Tensor | None = None
    top_k: int = 0
    early: bool = False
    places: Tensor | None = None

    def placed(self, n_out: int) -> int:
        """Return what divides all places, 0 where rows are written in order."""
        return 0 if self.places is None else 16 if n_out % 16 == 0 else 1

    def constants(self, x: Tensor) -> dict[str, Any]:
        """Return the compile-time arguments that say where a product of ``x`` finds its tiles and what it waits for."""
        overlap = self.tile.overlap and x.is_cuda
        return {"ASM": x.is_cuda, "TOP_K": self.top_k, "EARLY": self.early and overlap, "PDL": overlap}


def tile_list(expert_offsets: Tensor, rows: int, tile: TileChoice, memory: Memory | None = None) -> TileList:
    """List the token tiles of ``expert_offsets [E+1]`` int64, on its device and without waiting for it."""
    experts, device = expert_offsets.numel() - 1, expert_offsets.device
    count = tile_count(rows, experts, tile.block_t)
    # Imported here: Triton exists for Linux alone, and everything but a launch works without it.
    from ...kernels.tiles.choice import tile_list_kernel

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
    ``[T, ceil(K / 128)]`` or ``[T, 1]`` for E4M3 rows, or ``[R, ceil(K / 128)]`` from ``across`` where ``lies_across``
    says so, with x from ``halves_and_sums`` for weights that rescale rows. tiles: from ``tile_list``; when nothing is
    sorted expert_offsets is not read, and source only says that row r reads x at r // top_k. Rows from
    ``expert_offsets[E]`` on are not written. With ``tiles.places`` out is ``[any, N]``, and rows go where those say.
    Raises InputError for wrong shapes or dtypes.
    """
    _check(x, packed, out, x_scale)
    layout, tile = packed.layout, tiles.tile
    experts, _, n_out, k_in = layout.shape
    kernel: Any
    sizes: tuple[int, ...]
    spare = packed.values  # where a pointer is not used, of one dtype and alignment in every batch
    beside = scales_of(x_scale, spare)
    if isinstance(layout, Words):
        from ...kernels.w4a8 import w4a8_kernel

        kernel, sizes = w4a8_kernel, (n_out, x.stride(0), beside[0].stride(-1), layout.row_tiles)
        beside = beside[:1]
        own: dict[str, Any] = {"WARPS": tile.warps}
    else:
        from ...kernels.grouped_gemm import grouped_gemm_kernel

        kernel, sizes = grouped_gemm_kernel, (n_out, k_in, x.stride(0), *layout.steps, layout.scale_rows)
        scaled = packed.row_scale is not None and layout.operands == 1
        own = {"SCALE": layout.scale_kind, "WORDS": max(1, layout.words), "ROW_SCALE": scaled}
        own |= {"EVEN_K": k_in % layout.block_k == 0, "STACKED": tile.stacked, "JOINED": tile.joined}
    args = (
        x, *beside, *packed.pointers, out, tiles.places,
        spare if source is None else source, expert_offsets, tiles.expert, tiles.row, *sizes, tiles.count, experts,
        *bounds_of(activation),
    )  # fmt: skip
    own |= {"WEIGHT": layout.weight, "GATHER": source is not None, "BLOCK_N": tile.block_n, "NARROW": tile.narrow}
    constants = constants_of(packed, activation, x_scale, tiles) | own | {"DEPTH": tile.depth} | tiles.constants(x)
    grid = (tiles.count * -(-layout.operand_rows[1] // tile.columns),)
    launch(kernel, grid, args, constants, num_warps=tile.warps, maxnreg=tile.registers or None)
    return out


def scales_of(x_scale: Tensor | ZeroPointCorrection | None, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales of rows and sums of their columns, ``spare`` for what is missing."""
    if isinstance(x_scale, ZeroPointCorrection):
        return x_scale
    return (spare if x_scale is None else x_scale), spare


def bounds_of(activation: ActivationSpec | None) -> tuple[float, ...]:
    """Return the numbers of an activation, in the order of every product's arguments."""
    spec = activation or ActivationSpec()
    first = spec.beta if spec.kind == "swiglu_oai" else spec.gate_bound
    return float(spec.limit or 0.0), float(spec.alpha), float(first), float(spec.up_bound)


def kind_of(activation: ActivationSpec | None) -> int:
    """Return the KIND that kernels know an activation by."""
    if activation is None:
        return NO_ACTIVATION
    return ACTIVATION_KINDS.index(activation.kind) + (FAST_MATH if activation.fast else 0)


def constants_of(
    packed: PackedMatrix,
    activation: ActivationSpec | None,
    x_scale: Tensor | ZeroPointCorrection | None,
    tiles: TileList,
) -> dict[str, Any]:
    """Return the compile-time arguments of every product."""
    layout, scale = packed.layout, scales_of(x_scale, packed.values)[0]
    per_row = 0 if x_scale is None else 2 if scale.shape[1] == 1 else 1 if scale.stride(1) == 1 else 3
    found = {"BIAS": packed.bias is not None, "PARTS": layout.shape[1], "KIND": kind_of(activation)}
    found |= {"HAS_LIMIT": activation is not None and activation.limit is not None, "K_BLOCKS": layout.k_blocks}
    found |= {"BLOCK_K": layout.block_k, "X_SCALE": per_row, "BLOCK_T": tiles.tile.block_t, "STAGES": tiles.tile.stages}
    return found | {"GROUP_T": tiles.tile.group_t, "PLACED": tiles.placed(layout.shape[2])}


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
    if (isinstance(x_scale, ZeroPointCorrection), x_scale is not None) != (
        layout.rescaled,
        layout.scaled_rows or layout.rescaled,
    ):
        raise InputError(
            "grouped_gemm: E4M3 rows need x_scale, weights that rescale rows what halves_and_sums gives, others neither"
        )
    if out.dim() != 2 or out.shape[1] != n_out or not out.is_contiguous():
        raise InputError(f"grouped_gemm: out is {tuple(out.shape)}, these weights write contiguous [rows, {n_out}]")
