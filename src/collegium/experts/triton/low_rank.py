"""The inner rows of adapters, ``scale * A @ x`` of each row that has one, for a product that adds B times them."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...adapters import AdapterMatrices
from ...kernels.arguments import AdapterRows
from ...runtime.launch import launch, overlaps, power_at_least
from ...runtime.memory import Memory, alloc

if TYPE_CHECKING:
    from .grouped import TileList

__all__ = ["AdaptedRows", "LowRankRows", "low_rank_rows"]

_MIN_BLOCK_T, _MAX_BLOCK_T = 16, 64  # rows multiplied at once
_BLOCK_BYTES = 256  # of columns multiplied at once
_MAX_TURNS = 8  # programs that share the adapters of a tile


class AdaptedRows(NamedTuple):
    """The rows of a batch and their adapters.

    ids: ``[T]``, the adapter of each token. source: ``[R]`` int64, the token of each row; any tensor where nothing is
    sorted. expert_offsets: as in ``ContiguousBatch``. rows: R. input_weights: float32 ``[R]``, factors of the tokens,
    or None.
    """

    ids: Tensor
    source: Tensor
    expert_offsets: Tensor
    rows: int
    input_weights: Tensor | None = None


class LowRankRows(NamedTuple):
    """The arguments of a product kernel for rows with adapters. rank: of ``AdapterRows.inner``, a multiple of 16."""

    rows: AdapterRows
    rank: int


def low_rank_rows(
    x: Tensor,
    matrices: AdapterMatrices,
    batch: AdaptedRows,
    tiles: "TileList",
    *,
    gathered: bool,
    memory: Memory | None = None,
) -> LowRankRows | None:
    """Return the inner rows ``[R, P, rank]`` of one product, None where no adapter changes it.

    The product has to be launched next: it waits for the inner rows alone, when it adds them.

    x: ``[T, K]`` tokens where ``gathered``, otherwise rows ``[R, K]`` in order. tiles: of the product. memory: where
    "inner" comes from.
    """
    rank = matrices.inner_rank
    if rank == 0:
        return None
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ...kernels.low_rank import low_rank_kernel

    projections = matrices.projections
    inner = alloc(memory, "inner", (batch.rows, projections, rank), torch.float32, x.device)
    arguments = AdapterRows(
        batch.ids,
        batch.source,
        inner,
        matrices.a,
        matrices.b,
        matrices.table,
        len(matrices.ranks),
        matrices.experts,
    )
    tile_t = tiles.tile.block_t if tiles.top_k == 0 else 1
    block_t = _block_t(tile_t, batch.rows, matrices.experts)
    sizes = (x.stride(0), matrices.k_in)
    args = (x, arguments, matrices.scale, batch.input_weights, batch.expert_offsets, tiles.expert, tiles.row, *sizes)
    constants = {
        "PROJECTIONS": projections,
        "RANK": rank,
        "TILE_T": tile_t,
        "BLOCK_T": block_t,
        "BLOCK_K": _BLOCK_BYTES // x.element_size(),
        # Few programs read far ahead. Many take little shared memory: the product starts when all of them run.
        "STAGES": 3 if tiles.top_k else 2,
        "TOP_K": tiles.top_k,
        "GATHER": gathered,
        "ASM": x.is_cuda,
        "PDL": overlaps(x),
    }
    turns = 1 if tiles.top_k else _turns(batch.rows, matrices)
    grid = (tiles.count, projections * (rank // 16), turns)
    launch(low_rank_kernel, grid, args, constants, num_warps=4)
    return LowRankRows(arguments, rank)


def _block_t(tile_t: int, rows: int, experts: int) -> int:
    """Return how many rows of a tile of ``tile_t`` are multiplied at once: the fewest where experts have few."""
    # By the power of two above the rows, by which batches are warmed up.
    few = power_at_least(rows) <= _MIN_BLOCK_T * experts
    return _MIN_BLOCK_T if few else min(max(tile_t, _MIN_BLOCK_T), _MAX_BLOCK_T)


def _turns(rows: int, matrices: AdapterMatrices) -> int:
    """Return how many programs share the adapters of a tile: about as many as occur in it, of ``rows`` in all."""
    return min(2 * power_at_least(-(-rows // matrices.experts)), len(matrices.ranks), _MAX_TURNS)
