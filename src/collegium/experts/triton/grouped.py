"""Grouped product over rows packed by expert: reference, checks, launch, and the two products of a batch.

Shape letters: T tokens, R rows, E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ...ops.activation import activate
from ...ops.permute import tile_count
from ...ops.quantize import AS_IS, PADDED, REORDERED
from ...runtime.launch import launch, power_of_two
from ...runtime.workspace import empty
from ...types import ACTIVATION_KINDS, ActivationSpec
from .tiles import TileChoice, TileProblem

if TYPE_CHECKING:
    from torch import Tensor


__all__ = [
    "PackedMatrix",
    "TileList",
    "constants",
    "grouped_gemm",
    "grouped_gemm_reference",
    "tile_count",
    "tile_list",
]

PLAIN, E4M3_LANES, E4M3_E4M3, E2M1_LANES, INT4_LANES = range(5)
# Four-bit codes for E4M3 rows, of kernels/w4a8.py.
E2M1_E8M0, INT4_FLOAT, E2M1_E4M3, E2M1_SCALED, INT4_PAIRS, INT4_FLOATS = range(6, 12)
NO_SCALE, BLOCK_SCALE, E8M0_SCALE, E4M3_SCALE, GROUP_SCALE, PAIR_SCALE = range(6)
_BLOCK_TILES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix:
    """Weights ``[E, P, N, K]`` as the kernel reads them.

    values: plain and E4M3: ``[E, P, N, K or more]``; lanes: int16 ``[E, P, ceil(K / block_k), N, block_k / 4]``, of
        E4M3 codes twice as many; for the kernel of four-bit weights and E4M3 rows see ``experts/triton/words.py``.
    weight, scale_kind: how values become operands and which scale stands in the K loop (the constants above).
    scale: 32-bit ``[E, P, ceil(K / block_k), words, N]``, or float32 ``[E, P, ceil(N / 128), ceil(K / 128)]`` for
        blocks.
    row_scale ``[E, P, N]`` float32 and bias ``[E, P, N]`` floating, or None. bits: stored bits a weight.
    """

    values: Tensor
    shape: tuple[int, int, int, int]
    weight: int
    block_k: int
    bits: float
    scale_kind: int = NO_SCALE
    words: int = 1
    scale: Tensor | None = None
    row_scale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def k_blocks(self) -> int:
        """Steps of the K loop."""
        return -(-self.shape[3] // self.block_k)

    @property
    def steps(self) -> tuple[int, int, int]:
        """Elements of ``values`` from one row, K block and part to the next."""
        if self.weight not in (PLAIN, E4M3_E4M3):
            lanes = self.block_k // (2 if self.weight == E4M3_LANES else 4)
            return lanes, self.shape[2] * lanes, self.k_blocks * self.shape[2] * lanes
        wide = self.values.shape[-1]
        return wide, self.block_k, self.shape[2] * wide

    @property
    def row_order(self) -> int:
        """How the kernel reads rows of codes (see ``ops/operand.py``)."""
        if self.weight < E2M1_E8M0:
            return AS_IS
        return PADDED if self.weight in (E2M1_SCALED, INT4_PAIRS, INT4_FLOATS) else REORDERED

    def problem(self, rows: int, x_bits: int, x_groups: bool) -> TileProblem:
        """Return what tile choice asks about a product of ``rows`` rows with these weights."""
        experts, parts, n_out, k_in = self.shape
        if self.weight >= E2M1_E8M0:  # both parts stand in one tile
            parts, n_out = 1, self.values.shape[1] * self.values.shape[3]
        return TileProblem(
            rows=rows,
            experts=experts,
            n_out=n_out,
            k_in=k_in,
            parts=parts,
            block_k=self.block_k,
            weight_bits=self.bits,
            x_bits=x_bits,
            decoded=self.weight not in (PLAIN, E4M3_E4M3),
            promoted=x_groups or self.scale_kind in (BLOCK_SCALE, GROUP_SCALE, PAIR_SCALE),
            quartered=self.weight in (INT4_PAIRS, INT4_FLOATS),
            operands=2 if self.weight == E2M1_E4M3 else 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TileList:
    """expert ``[count]`` int32 (-1: no tile) and first row ``[count]`` int64 of each token tile of ``tile``.

    used: ``[1]`` int32, how many tiles have an expert; they stand first. None: not counted. top_k: not 0 when nothing
    is sorted: then expert holds the ids ``[T, top_k]`` of any width and value, and row r is assignment r, one tile.
    early: the list was there before the kernel launched last let others begin, since that one waited for it.
    """

    expert: Tensor
    row: Tensor
    count: int
    tile: TileChoice
    used: Tensor | None = None
    top_k: int = 0
    early: bool = False

    def constants(self, x: Tensor) -> dict[str, Any]:
        """Return the compile-time arguments that say where a product of ``x`` finds its tiles and what it waits for."""
        overlap = self.tile.overlap and x.is_cuda
        return {"ASM": x.is_cuda, "TOP_K": self.top_k, "EARLY": self.early and overlap, "PDL": overlap}


def grouped_gemm_reference(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    source: Tensor | None = None,
    bias: Tensor | None = None,
    activation: ActivationSpec | None = None,
) -> Tensor:
    """Return ``[R, N]`` float32: row r of expert e is ``activation(x[source[r]] @ weight[e].T + bias[e])``.

    x ``[T, K]`` and weight ``[E, P, N, K]`` floating, multiplied in float32; bias ``[E, P, N]``. Without an
    activation P is 1. Rows no expert owns are zero. Reads the offsets on the host.
    """
    experts, parts, n_out, k_in = weight.shape
    index = torch.arange(x.shape[0], device=x.device) if source is None else source
    out = torch.zeros(index.numel(), n_out, device=x.device)
    offsets: list[int] = expert_offsets.tolist()
    for expert in range(experts):
        span = slice(offsets[expert], offsets[expert + 1])
        product = x[index[span]].float() @ weight[expert].float().reshape(parts * n_out, k_in).T
        product = product.view(-1, parts, n_out)
        if bias is not None:
            product = product + bias[expert].float()
        out[span] = product[:, 0] if activation is None else activate(product, activation)
    return out


def tile_list(expert_offsets: Tensor, rows: int, tile: TileChoice) -> TileList:
    """List the token tiles of ``expert_offsets [E+1]`` int64, on its device and without waiting for it."""
    experts = expert_offsets.numel() - 1
    count = tile_count(rows, experts, tile.block_t)
    # Imported here: Triton exists for Linux alone, and everything but a launch works without it.
    from ...kernels.tiles import tile_list_kernel

    expert = empty((count,), torch.int32, expert_offsets.device)
    used = empty((1,), torch.int32, expert_offsets.device)
    row = empty((count,), torch.int64, expert_offsets.device)
    constants = {"BLOCK_T": tile.block_t, "BLOCK_E": power_of_two(experts, 16), "BLOCK_TILES": _BLOCK_TILES}
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
    x_scale: Tensor | None = None,
    activation: ActivationSpec | None = None,
) -> Tensor:
    """Write ``out [R, N]`` and return it; see ``grouped_gemm_reference`` for what stands in it.

    x: ``[T, K]`` of the operand dtype, read at ``source [R]`` int64, or row by row without it. x_scale: float32
    ``[T, ceil(K / 128)]`` or ``[T, 1]`` for E4M3 rows. tiles: from ``tile_list``; when nothing is sorted expert_offsets
    is not read, and source only says that row r reads x at r // top_k. Rows from
    ``expert_offsets[E]`` on are not written. Raises InputError for wrong shapes or dtypes.
    """
    _check(x, packed, out, x_scale)
    if packed.weight >= E2M1_E8M0:
        from .words import launch_w4a8

        return launch_w4a8(x, packed, expert_offsets, tiles, out, source, x_scale, activation)
    _, _, n_out, k_in = packed.shape
    spec, tile = activation or ActivationSpec(), tiles.tile
    n_step, k_step, part_step = packed.steps
    blocks = packed.scale_kind == BLOCK_SCALE and packed.scale is not None
    spare = packed.values  # stands where a pointer is not used, of one dtype and alignment in every batch
    from ...kernels.grouped_gemm import grouped_gemm_kernel

    args = (
        x,
        spare if x_scale is None else x_scale,
        packed.values,
        spare if packed.scale is None else packed.scale,
        spare if packed.row_scale is None else packed.row_scale,
        spare if packed.bias is None else packed.bias,
        out,
        spare if source is None else source,
        expert_offsets,
        tiles.expert,
        tiles.row,
        n_out,
        k_in,
        x.stride(0),
        n_step,
        k_step,
        part_step,
        packed.scale.shape[2] if blocks and packed.scale is not None else 1,
        tiles.count,
        packed.shape[0],
        float(spec.limit or 0.0),
        float(spec.alpha),
        float(spec.gate_bound),
        float(spec.up_bound),
    )
    fixed = constants(packed, tile, activation, x_groups=0 if x_scale is None else 1 + (x_scale.shape[1] == 1))
    fixed |= {"GATHER": source is not None} | tiles.constants(x)
    launch(grouped_gemm_kernel, (tiles.count * -(-n_out // tile.columns),), args, fixed, num_warps=tile.warps)
    return out


def constants(
    packed: PackedMatrix, tile: TileChoice, activation: ActivationSpec | None, *, x_groups: int
) -> dict[str, Any]:
    """Return the compile-time arguments that follow from the weights, the tile and the activation."""
    return {
        "WEIGHT": packed.weight,
        "SCALE": packed.scale_kind,
        "WORDS": packed.words,
        "X_SCALE": x_groups,
        "ROW_SCALE": packed.row_scale is not None,
        "BIAS": packed.bias is not None,
        "PARTS": packed.shape[1],
        "KIND": -1 if activation is None else ACTIVATION_KINDS.index(activation.kind),
        "HAS_LIMIT": activation is not None and activation.limit is not None,
        "K_BLOCKS": packed.k_blocks,
        "EVEN_K": packed.shape[3] % packed.block_k == 0,
        "BLOCK_N": tile.block_n,
        "BLOCK_T": tile.block_t,
        "BLOCK_K": packed.block_k,
        "GROUP_T": tile.group_t,
        "STAGES": tile.stages,
        "STACKED": tile.stacked,
    }


def _check(x: Tensor, packed: PackedMatrix, out: Tensor, x_scale: Tensor | None) -> None:
    _, _, n_out, k_in = packed.shape
    four = packed.weight >= E2M1_E8M0
    if four:
        k_in = packed.k_blocks * packed.block_k
    if x.dim() != 2 or x.shape[1] != k_in or x.stride(1) != 1:
        raise InputError(
            f"grouped_gemm: x is {tuple(x.shape)} with strides {x.stride()}, these weights need [rows, {k_in}] with "
            "dense rows; call contiguous() first"
        )
    eight = four or packed.weight == E4M3_E4M3
    if eight:
        allowed = (torch.float8_e4m3fn,)
    elif packed.weight == PLAIN:
        allowed = (packed.values.dtype,)
    else:
        allowed = (torch.bfloat16,)
    if x.dtype not in allowed:
        raise InputError(f"grouped_gemm: x is {x.dtype}, these weights multiply {allowed[0]}; convert x")
    if (x_scale is not None) != eight:
        raise InputError("grouped_gemm: E4M3 rows need x_scale, other rows must not have one")
    if out.dim() != 2 or out.shape[1] != n_out or not out.is_contiguous():
        raise InputError(f"grouped_gemm: out is {tuple(out.shape)}, these weights write contiguous [rows, {n_out}]")
