"""Columns of rows in the order of each row's expert, where GPTQ sorted them by activation, and sums of columns.

Shape letters: T tokens, R rows, E experts, K columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..runtime.launch import launch, overlaps, power_at_least
from ..runtime.memory import take

if TYPE_CHECKING:
    from torch import Tensor

    from ..runtime.memory import Memory

__all__ = ["column_sums", "in_columns", "in_columns_reference", "padded_rows"]

_BLOCK = 1024


def in_columns_reference(x: Tensor, order: Tensor, experts: Tensor, source: Tensor) -> Tensor:
    """Return ``[R, K]``: row r is ``x[source[r]]`` at columns ``order[experts[r]]``."""
    return x.index_select(0, source).gather(1, order.index_select(0, experts).long())


def in_columns(
    x: Tensor, order: Tensor, owner: Tensor, source: Tensor | None, *, top_k: int = 0, memory: Memory | None = None
) -> Tensor:
    """Return ``[R, K]`` as ``in_columns_reference`` defines it, in one launch; rows of no expert are not written.

    x: ``[T, K]`` with dense rows. order: int32 ``[E, K]``. owner: int64 ``[E+1]``, where each expert's rows begin, and
    row r reads x at ``source [R]`` or r; with top_k the ids ``[T, top_k]`` of rows that are not sorted, and row r reads
    x at r // top_k. memory: where the result, "ordered", comes from.
    """
    from ..kernels.columns import columns_kernel

    experts, columns = order.shape
    rows = owner.numel() if top_k else x.shape[0] if source is None else source.numel()
    out = take(memory, "ordered", (rows, columns), x.dtype, x.device)
    args = (x, order, owner if source is None else source, owner, out, columns, x.stride(0), experts)
    gather = source is not None or top_k > 0
    constants = {"GATHER": gather, "TOP_K": top_k, "BLOCK_E": power_at_least(experts, 16), "BLOCK": _BLOCK}
    constants["PDL"] = overlaps(x)
    if rows:
        launch(columns_kernel, (rows, -(-columns // _BLOCK)), args, constants, num_warps=4)
    return out


def padded_rows(rows: int) -> int:
    """Return the columns of transposed ``column_sums``: a tile of 128 may begin at any row."""
    return -(-rows // 16) * 16 + 128


def column_sums(
    x: Tensor, *, used: Tensor | None = None, transposed: bool = False, memory: Memory | None = None
) -> Tensor:
    """Return float32 ``[R, 4 * ceil(K / 128)]``: sums of 32 columns each of ``x [R, K]``, zero beyond K, in one launch.

    transposed: return ``[4 * ceil(K / 128), padded_rows(R)]``, of which columns beyond R are not written.
    used: ``[1]`` int64, how many rows anybody reads; no others are written. memory: where the result, "sums", is from.
    """
    from ..kernels.columns import sums_kernel

    (rows, columns), groups = x.shape, 4 * -(-x.shape[1] // 128)
    shape = (groups, padded_rows(rows)) if transposed else (rows, groups)
    out = take(memory, "sums", shape, torch.float32, x.device)
    constants = {"SOME": used is not None, "BLOCK": _BLOCK // 32, "PDL": overlaps(x)}
    steps = out.stride()[::-1] if transposed else out.stride()
    args = (x, x if used is None else used, out, columns, x.stride(0), groups, *steps)
    if rows:
        launch(sums_kernel, (rows, -(-groups * 32 // _BLOCK)), args, constants, num_warps=4)
    return out
