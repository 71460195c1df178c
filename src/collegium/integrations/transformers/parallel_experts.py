"""Experts of blocks that hold one stack of matrices per product (JetMoE), run by Collegium."""

from torch import Tensor

from ...models.derived import ParallelExperts
from .plugin import experts_forward

__all__ = ["RunParallelExperts"]


class RunParallelExperts(ParallelExperts):
    """The experts of such a block, without weights until a layer is attached."""

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weighted sum ``[T, H]`` of experts for ``x [T, H]``, ids and weights ``[T, K]``."""
        return experts_forward(self, x, topk_ids, topk_weights)
