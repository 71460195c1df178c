"""The way of a batch through the routed experts: dispatch, run, combine; or, for very few tokens, without sorting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .experts.triton.packed import PackedExperts, few_tokens, large_from, run_assignments
from .ops.weighted_sum import weighted_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .experts import ExpertKernel
    from .parallel.local import Local
    from .types import Routing

__all__ = ["DirectPipeline", "SplitPipeline", "ways"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPipeline:
    """Three replaceable steps; the router weight is applied in ``combine`` (or on the input) and nowhere else."""

    dispatcher: Local
    kernel: ExpertKernel
    packed: Any
    after_expert: Callable[[Tensor], Tensor] | None = None

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the routed experts' weighted sum ``[T, H]`` for ``x [T, H]``, plus ``shared``, rounded once."""
        # Kernels that walk token tiles get their lists from the launch that orders the rows.
        tiled = x.is_cuda and isinstance(self.packed, PackedExperts)
        block_t = self.packed.block_t(routing.topk_ids.numel()) if tiled else ()
        batch, handle = self.dispatcher.dispatch(x, routing, block_t=block_t)
        rows = self.kernel.run(batch, self.packed)
        if self.after_expert is not None:
            rows = self.after_expert(rows)
        return self.dispatcher.combine(rows, handle, dtype=dtype, shared=shared, out=out)


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectPipeline:
    """Few assignments on a GPU: rows stay in the order of the ids, so nothing is sorted before or after the experts.

    Bits are those of ``SplitPipeline``, since a row's bits depend on no other row. most: the tokens it serves, from
    ``few_tokens``.
    """

    packed: PackedExperts
    most: int
    after_expert: Callable[[Tensor], Tensor] | None = None

    def serves(self, x: Tensor, routing: Routing) -> bool:
        """Return whether the batch is small enough."""
        return x.is_cuda and 0 < routing.topk_ids.shape[0] <= self.most

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the routed experts' weighted sum ``[T, H]`` for ``x [T, H]``, plus ``shared``, rounded once."""
        ids, weights = routing.topk_ids.contiguous(), routing.topk_weights.contiguous()
        rows = run_assignments(x, ids, self.packed)
        if self.after_expert is not None:
            rows = self.after_expert(rows)
        experts = self.packed.down.layout.shape[0]
        return weighted_sum(rows, ids, weights, dtype, shared=shared, out=out, experts=experts)


def ways(packed: PackedExperts, top_k: int, most: int, *, direct: bool) -> str:
    """Return in words which counts of tokens, up to ``most``, take which way through the experts on a GPU."""
    few, large = min(most, few_tokens(packed, top_k)) if direct else 0, large_from(packed, most * top_k)
    parts = [f"up to {few} tokens unsorted"] if few else []
    parts += ["sorted by expert" if few or large else "all sorted by expert"]
    parts += [f"from {-(-large // top_k):,} tokens with tiles for large batches"] if large is not None else []
    return ", ".join(parts)
