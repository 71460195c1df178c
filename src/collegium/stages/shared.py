"""The shared expert: to its kernel one expert that every token goes to, with a sigmoid gate where the model has one."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..experts import ExpertKernel, Packed
from ..formats.payload import Payload
from ..ops.linear import linear
from ..problem import Problem
from ..runtime.memory import Memory, part
from ..types import ContiguousBatch, SharedWeights
from .checks import check_weights

__all__ = ["SharedExpert", "pack_shared"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpert:
    """The packed shared expert of a layer.

    rows: ``[max_tokens + 1]`` int64, every batch is the first rows in order; bounds: ``[max_tokens + 1, 2]``, row T is
    (0, T). gate: ``[1, D]`` float32 or None.
    """

    experts: Packed
    rows: Tensor
    bounds: Tensor
    gate: Tensor | None

    def __call__(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        """Return ``[T, D]``, what is added to the routed experts' sum for ``x [T, D]``."""
        tokens = x.shape[0]
        batch = ContiguousBatch(x=x, source=self.rows[:tokens], expert_offsets=self.bounds[tokens])
        out = self.experts.run(batch, part(memory, "shared"))
        if self.gate is None:
            return out
        gate = linear(x, self.gate, memory=part(memory, "gate"))
        # In float64: torch's float32 sigmoid gives the last rows of a batch other bits on a CPU.
        return torch.sigmoid(gate.double()).float() * out

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return what has to be compiled for a batch of ``tokens`` tokens."""
        return self.experts.tiling.variants(tokens, unsorted=False)


def pack_shared(shared: SharedWeights[Payload], problem: Problem, kernel: ExpertKernel) -> SharedExpert:
    """Pack the shared expert for ``kernel``; raises InputError when weights and spec disagree."""
    asked = problem.shared()
    check_weights(shared.experts, asked)
    rows = torch.arange(problem.limits.max_tokens + 1, device=shared.experts.down.device)
    return SharedExpert(
        experts=kernel.pack(shared.experts, asked),
        rows=rows,
        bounds=torch.stack((torch.zeros_like(rows), rows), dim=1),
        gate=None if shared.gate is None else shared.gate.detach().float(),
    )
