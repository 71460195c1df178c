"""Order assignments by expert: which token each row reads, and where each assignment's row stands.

Shape letters: T tokens, K experts per token, E experts, R = T*K rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Permutation", "permute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Permutation:
    """Rows sorted by expert, then token, then slot; dropped assignments stand last. All indices are int64.

    source: ``[T*K]``, row r belongs to token ``source[r]``.
    expert_offsets: ``[E+1]``, expert e owns rows ``expert_offsets[e]:expert_offsets[e+1]``; rows from
        ``expert_offsets[E]`` on are dropped assignments.
    slots: ``[T, K]``, the row of assignment (t, k), or -1 when it is dropped.
    weights_by_row: ``[T*K]`` float32, ``input_weights`` in row order with 0 for dropped rows, or None.
    """

    source: Tensor
    expert_offsets: Tensor
    slots: Tensor
    weights_by_row: Tensor | None = None


def permute(topk_ids: Tensor, num_experts: int, *, input_weights: Tensor | None = None) -> Permutation:
    """Sort the assignments of ``topk_ids [T, K]`` (integers) by expert, stably.

    input_weights: ``[T, K]`` floating, carried into row order. Ids outside ``0..num_experts-1`` count as
        dropped.
    Raises ``InputError`` for wrong shapes or dtypes.
    """
    if topk_ids.dim() != 2 or topk_ids.shape[1] < 1 or topk_ids.is_floating_point() or topk_ids.dtype == torch.bool:
        raise InputError(f"topk_ids: found {tuple(topk_ids.shape)} {topk_ids.dtype}, allowed: [T, K >= 1] integers")
    if num_experts < 1:
        raise InputError(f"num_experts: found {num_experts}, allowed: at least 1")
    tokens, top_k = topk_ids.shape
    ids = topk_ids.to(torch.int64).reshape(-1)
    dropped = (ids < 0) | (ids >= num_experts)
    keys, order = ids.masked_fill(dropped, num_experts).sort(stable=True)
    # A search in the sorted keys instead of a histogram: bincount waits for the device, scatter_add is not
    # ordered.
    experts = torch.arange(num_experts + 1, device=ids.device)
    expert_offsets = torch.searchsorted(keys, experts)
    rows = torch.arange(tokens * top_k, device=ids.device)
    slots = torch.empty_like(rows).scatter(0, order, rows).masked_fill(dropped, -1)
    weights = None
    if input_weights is not None:
        if tuple(input_weights.shape) != (tokens, top_k) or not input_weights.is_floating_point():
            raise InputError(
                f"input_weights: found {tuple(input_weights.shape)} {input_weights.dtype}, allowed: floating "
                f"({tokens}, {top_k}) like topk_ids"
            )
        weights = input_weights.reshape(-1).to(torch.float32).masked_fill(dropped, 0.0).index_select(0, order)
    source = torch.div(order, top_k, rounding_mode="floor")
    return Permutation(
        source=source, expert_offsets=expert_offsets, slots=slots.view(tokens, top_k), weights_by_row=weights
    )
