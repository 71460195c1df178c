"""Low-rank changes of stored matrices (LoRA): the update of a part of a weight, and pairs for a stack of experts.

Source of the layout of stacks: PEFT 0.21, ``ParamWrapper.get_delta_weight`` in ``tuners/lora/layer.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LowRank", "pairs_of_stack"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """The update of rows of one stored tensor: ``scale * b [R, r] @ a [r, K]``.

    rows: stored rows, R of them. index: entry of a stack of matrices. transposed: the matrix is stored ``[K, N]``.
    """

    a: Tensor
    b: Tensor
    scale: float
    rows: range
    index: int | None = None
    transposed: bool = False

    def add_to(self, out: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        """Add to ``out``, the float32 part of the stored tensor between ``bounds`` of each dimension, in place."""
        if self.index is not None:
            first, stop = bounds[0]
            if not first <= self.index < stop:
                return
            out = out[self.index - first]
        rows, columns = bounds[-2:]
        if self.transposed:
            out = out.mT
            rows, columns = columns, rows
        stored = torch.arange(self.rows.start, self.rows.stop, self.rows.step)
        inside = (stored >= rows[0]) & (stored < rows[1])
        # A float64 product, rounded to float32, hardly depends on how it is cut.
        a, b = self.a[:, columns[0] : columns[1]].double(), self.b[inside].double()
        out[stored[inside] - rows[0]] += (self.scale * (b @ a)).float()


def pairs_of_stack(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return ``[E, r, K]`` and ``[E, N, r]`` from PEFT's ``a [E*r, K]``, expert by expert, and ``b [N, r*E]``.

    The columns of ``b`` go rank by rank, the experts of one rank adjacent.
    """
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
