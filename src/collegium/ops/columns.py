"""Columns of rows in the order of each row's expert, which GPTQ sorted by activation, and sums of columns.

Shape letters: T tokens, R rows, E experts, K columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import launch, overlaps, power_at_least
from ..runtime.memory import Memory, alloc

__all__ = ["SUMS", "ZeroPointCorrection", "gather_columns", "halves_and_sums"]

SUMS = 32  # halves for each 128 columns of a row
_BLOCK = 1024


def gather_columns(
    x: Tensor, order: Tensor, owner: Tensor, source: Tensor | None, *, top_k: int = 0, memory: Memory | None = None
) -> Tensor:
    """Return ``[R, K]``: row r is its row of x at columns ``order[its expert]``; rows of no expert are not written.

    x: ``[T, K]`` with dense rows. order: int32 ``[E, K]``. owner: int64 ``[E+1]``, where each expert's rows begin, and
    row r reads x at ``source [R]`` or r; with top_k the ids ``[T, top_k]`` of rows that are not sorted, and row r reads
    x at r // top_k. memory: where the result, "ordered", comes from.
    """
    from ..kernels.columns import columns_kernel

    experts, columns = order.shape
    rows = x.shape[0] if source is None else source.numel()
    if top_k:
        rows = owner.numel()
    out = alloc(memory, "ordered", (rows, columns), x.dtype, x.device)
    args = (x, order, source, owner, out, columns, x.stride(0), experts)
    constants = {
        "TOP_K": top_k,
        "BLOCK_E": power_at_least(experts, 16),
        "BLOCK": _BLOCK,
        "PDL": overlaps(x),
    }
    if rows:
        launch(columns_kernel, (rows, -(-columns // _BLOCK)), args, constants, num_warps=4)
    return out


class ZeroPointCorrection(NamedTuple):
    """Scales of rows in float16 and sums of their columns, which the zero points of weights multiply.

    scale: float32 ``[R, 1]``. sums: float16 ``[R, SUMS * ceil(K / 128)]``: for each 32 columns their sum, rounded, the
    rounding error, and six zeros; zeros beyond K.
    """

    scale: Tensor
    sums: Tensor


def halves_and_sums(
    x: Tensor, *, used: Tensor | None = None, memory: Memory | None = None
) -> tuple[Tensor, ZeroPointCorrection]:
    """Return rows of ``x [R, K]`` in float16 with their scales and sums, in one launch.

    A row's scale is the power of two that brings its largest number between 2^9 and 2^10, so that sums fit. Nothing is
    rounded but numbers below 2^-26 of that. A row with NaN or infinity gets zeros and a NaN scale. used: ``[1]`` int64,
    how many rows are read later; no others are written. memory: where "halves", "scales" and "sums" come from.
    """
    from ..kernels.columns import halves_kernel

    rows, columns = x.shape
    blocks = -(-columns // 128)
    halves = alloc(memory, "halves", (rows, columns), torch.float16, x.device)
    scale = alloc(memory, "scales", (rows, 1), torch.float32, x.device)
    sums = alloc(memory, "sums", (rows, SUMS * blocks), torch.float16, x.device)
    args = (x, used, halves, scale, sums, columns, x.stride(0), 4 * blocks)
    block = power_at_least(columns, 128)
    constants = {"BLOCK": block, "PDL": overlaps(x)}
    if rows:
        launch(halves_kernel, (rows,), args, constants, num_warps=max(1, min(16, block // 512)))
    return halves, ZeroPointCorrection(scale, sums)
