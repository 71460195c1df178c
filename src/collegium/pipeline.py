"""The way of a batch through the routed experts: dispatch, run, combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .ops.grouped_gemm import PackedExperts

if TYPE_CHECKING:
    from torch import Tensor

    from .experts import ExpertKernel
    from .parallel.local import Local
    from .types import Routing

__all__ = ["SplitPipeline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPipeline:
    """Three replaceable steps; the router weight is applied in ``combine`` (or on the input) and nowhere else."""

    dispatcher: Local
    kernel: ExpertKernel
    packed: Any

    def __call__(
        self, x: Tensor, routing: Routing, *, dtype: torch.dtype = torch.float32, shared: Tensor | None = None
    ) -> Tensor:
        """Return the routed experts' weighted sum ``[T, H]`` for ``x [T, H]``, plus ``shared``, rounded once."""
        # Kernels that walk token tiles get their lists from the launch that orders the rows.
        tiled = x.is_cuda and isinstance(self.packed, PackedExperts)
        block_t = self.packed.block_t(routing.topk_ids.numel()) if tiled else ()
        batch, handle = self.dispatcher.dispatch(x, routing, block_t=block_t)
        return self.dispatcher.combine(self.kernel.run(batch, self.packed), handle, dtype=dtype, shared=shared)
