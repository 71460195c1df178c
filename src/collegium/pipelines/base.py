"""What a pipeline is: what runs a batch through the routed experts, from chosen experts to weighted sums.

A plan names pipelines for numbers of tokens. A row of ``PIPELINES`` refuses problems, says up to how many tokens it
serves and what memory that takes, and is built from the parts of a layer. A kernel that fuses several steps is a
pipeline of its own.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..experts import ExpertKernel, PackedWeights, Tiling
from ..parallel import Dispatcher, DispatcherKind
from ..problem import ExpertsProblem, Problem
from ..runtime.memory import Memory, Regions
from ..types import Routing

__all__ = ["Pipeline", "PipelineKind", "PipelineParts", "PipelineQuery"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineQuery:
    """What a plan has chosen when it comes to pipelines.

    experts: with as many rows as the dispatcher may bring. pipeline: the one that was asked for by name, or None.
    """

    problem: Problem
    experts: ExpertsProblem
    kernel: ExpertKernel
    dispatcher: DispatcherKind
    tiling: Tiling
    pipeline: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineParts:
    """What a layer builds its pipelines from. after_expert: applied to the experts' rows before they are weighted."""

    experts: PackedWeights
    dispatcher: Dispatcher
    top_k: int
    num_experts: int
    after_expert: Callable[[Tensor], Tensor] | None = None


class Pipeline(Protocol):
    """Runs a batch through the routed experts."""

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype,
        shared: Callable[[], Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the routed experts' weighted sum ``[T, H]`` for ``x [T, H]``, plus ``shared()``, rounded once."""
        ...

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return what has to be compiled for a batch of ``tokens`` tokens; equal members are compiled once."""
        ...


class PipelineKind(Protocol):
    """One row of ``PIPELINES``; does: what it does with a batch, in a few words."""

    name: str
    does: str

    def refuse(self, asked: PipelineQuery) -> str | None:
        """Return why it cannot run what was asked, with numbers, or None; kernel and dispatcher were asked before."""
        return None

    def max_tokens(self, tiling: Tiling, top_k: int) -> int | None:
        """Return the most tokens it serves, or None for any number."""
        return None

    def family(self, tiling: Tiling, rows: int) -> str:
        """Return the name of the tiles that ``rows`` rows run with here, for people; empty without tiles."""
        return tiling.family(rows)

    def regions(self, asked: PipelineQuery) -> Regions:
        """Return the memory of a pass at most, by name."""
        ...

    def build(self, parts: PipelineParts) -> Pipeline:
        """Return the pipeline of a layer."""
        ...
