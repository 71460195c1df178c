"""What an experts kernel is: it refuses with a reason, packs weights once, and runs batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ..types import ContiguousBatch, ExpertWeights, Problem

__all__ = ["ExpertKernel"]


class ExpertKernel(Protocol):
    """One file in ``experts/``; ``Any`` stands for the kernel's own private packed type."""

    name: str
    capturable: bool

    def refuse(self, problem: Problem) -> str | None:
        """Return why this kernel cannot run ``problem``, with numbers, or None when it can."""
        ...

    def workspace_bytes(self, problem: Problem) -> int:
        """Return the bytes of temporary memory one forward pass of ``problem`` needs at most."""
        ...

    def pack(self, weights: ExpertWeights[Any], problem: Problem) -> Any:
        """Bring logical weights into the kernel's own layout; the source may be dropped afterwards."""
        ...

    def run(self, batch: ContiguousBatch, packed: Any) -> Tensor:
        """Return ``[R, H]``, row r being its expert's output for ``x[source[r]]``.

        float32, or the dtype the kernel's sums were rounded to.
        """
        ...
