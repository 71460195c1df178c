"""The way of a batch through the routed experts: dispatch, run, combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the routed experts' weighted sum ``[T, H]`` float32 for ``x [T, H]``."""
        batch, handle = self.dispatcher.dispatch(x, routing)
        return self.dispatcher.combine(self.kernel.run(batch, self.packed), handle)
