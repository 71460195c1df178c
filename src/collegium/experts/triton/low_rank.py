"""What adapters change in a product: ``scale * B @ (A @ x)`` of each row that has one.

Where experts have few rows, those changes are computed before the product, otherwise ``scale * A @ x`` alone (inner
rows), which the product multiplies by B.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...adapters import FEW_ROWS, AdapterMatrices, change_rows
from ...kernels.arguments import AdapterRows
from ...runtime.launch import launch, overlaps, power_at_least
from ...runtime.memory import Memory, alloc

if TYPE_CHECKING:
    from .grouped import TileList

__all__ = ["AdaptedRows", "LowRankRows", "low_rank_rows"]

_MIN_BLOCK_T, _MAX_BLOCK_T = FEW_ROWS, 64  # rows multiplied at once
_BLOCK_BYTES = 256  # of columns multiplied at once
_MAX_TURNS = 8  # programs that share the adapters of a tile
_PROGRAMS = 128  # about as many as an H100 has multiprocessors
_BLOCK_N = 128  # columns of changes multiplied at once, as in the kernel


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
    """The arguments of a product kernel for rows with adapters.

    rank: of inner rows, a multiple of 16. changes: ``AdapterRows.inner`` has whole changes instead of inner rows.
    """

    rows: AdapterRows
    rank: int
    changes: bool


def low_rank_rows(
    x: Tensor,
    matrices: AdapterMatrices,
    batch: AdaptedRows,
    tiles: "TileList",
    *,
    gathered: bool,
    memory: Memory | None = None,
) -> LowRankRows | None:
    """Return changes ``[R, P, N]`` or inner rows ``[R, P, rank]`` of one product, None where no adapter changes it.

    The product has to be launched next: it waits for them alone, when it adds them.

    x: ``[T, K]`` tokens where ``gathered``, otherwise rows ``[R, K]`` in order. tiles: of the product. memory: where
    "inner" comes from.
    """
    rank = matrices.inner_rank
    if rank == 0:
        return None
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ...kernels.low_rank import low_rank_kernel

    projections = matrices.projections
    changes = batch.rows <= change_rows(batch.rows, matrices.experts, rank)
    width = matrices.n_out if changes else rank
    inner = alloc(memory, "inner", (batch.rows, projections, width), torch.float32, x.device)
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
    sizes = (x.stride(0), matrices.k_in, matrices.n_out)
    args = (x, arguments, matrices.scale, batch.input_weights, batch.expert_offsets, tiles.expert, tiles.row, *sizes)
    constants = {
        "PROJECTIONS": projections,
        "RANK": rank,
        "CHANGES": changes,
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
    parts = _column_parts(tiles.count * turns * projections, matrices.n_out) if changes else rank // 16
    launch(low_rank_kernel, (tiles.count, projections * parts, turns), args, constants, num_warps=4)
    return LowRankRows(arguments, rank, changes)


def _block_t(tile_t: int, rows: int, experts: int) -> int:
    """Return how many rows of a tile of ``tile_t`` are multiplied at once: the fewest where experts have few."""
    # By the power of two above the rows, by which batches are warmed up.
    few = power_at_least(rows) <= _MIN_BLOCK_T * experts
    return _MIN_BLOCK_T if few else min(max(tile_t, _MIN_BLOCK_T), _MAX_BLOCK_T)


def _turns(rows: int, matrices: AdapterMatrices) -> int:
    """Return how many programs share the adapters of a tile: about as many as occur in it, of ``rows`` in all."""
    return min(2 * power_at_least(-(-rows // matrices.experts)), len(matrices.ranks), _MAX_TURNS)


def _column_parts(programs: int, n_out: int) -> int:
    """Return how many programs share the columns of a change, where there are ``programs`` for each."""
    return max(1, min(_PROGRAMS // programs, -(-n_out // _BLOCK_N)))
