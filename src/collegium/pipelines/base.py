"""Pipelines run a batch through the routed experts: from chosen experts to weighted sums.

A plan names one pipeline for each range of token counts. A row of ``PIPELINES`` (a ``PipelineKind``) refuses problems,
reports the largest batch it serves and the memory it needs, and builds a ``Pipeline`` from the parts of a layer. A
kernel that fuses several steps is a separate pipeline.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..adapters import TokenAdapters
from ..experts import ExpertKernel, PackedWeights, Tiling
from ..parallel import Dispatcher, DispatcherKind
from ..problem import ExpertsProblem, Problem
from ..runtime.memory import Memory, Regions
from ..types import Routing

__all__ = ["Pipeline", "PipelineKind", "PipelineParts", "PipelineQuery"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineQuery:
    """What a plan has chosen before it chooses pipelines.

    experts: with as many rows as the dispatcher may bring. pipeline: the pipeline that the caller forced, or None.
    """

    problem: Problem
    experts: ExpertsProblem
    kernel: ExpertKernel
    dispatcher: DispatcherKind
    tiling: Tiling
    pipeline: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineParts:
    """What a layer builds its pipelines from.

    after_expert: applied to the experts' rows before they are weighted. overlap_shared: the shared expert runs during
    an exchange with other ranks, where the dispatcher has one; otherwise after the routed experts. half_batches: up to
    how many tokens ``split`` runs a batch as two halves, 0: never.
    """

    experts: PackedWeights
    dispatcher: Dispatcher
    top_k: int
    num_experts: int
    after_expert: Callable[[Tensor], Tensor] | None = None
    overlap_shared: bool = False
    half_batches: int = 0


class Pipeline(Protocol):
    """Runs a batch through the routed experts."""

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype,
        shared: Callable[[], Tensor | None] | None = None,
        out: Tensor | None = None,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        """Return the routed experts' weighted sums ``[T, H]`` for ``x [T, H]``, plus ``shared()``, rounded once.

        memory: where buffers are taken from; None: fresh memory. dtype: of the result. shared: computes the shared
        expert's output ``[T, H]``, or stores it elsewhere and returns None. out: written and returned instead of a new
        tensor. adapters: of the tokens; only for pipelines of one rank.
        """
        ...

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return what a batch of ``tokens`` tokens needs compiled; equal members are compiled once."""
        ...


class PipelineKind(Protocol):
    """One row of ``PIPELINES``.

    description: how it runs a batch, in a few words. fills_gpu: its kernel occupies every multiprocessor and waits for
    other ranks, so nothing else can run at the same time.
    """

    name: str
    description: str
    fills_gpu: bool = False

    def refuse(self, query: PipelineQuery) -> str | None:
        """Return why it cannot run ``query``, with numbers, or None. Kernel and dispatcher have accepted it before."""
        return None

    def max_tokens(self, tiling: Tiling, top_k: int) -> int | None:
        """Return the largest number of tokens it serves, or None for any number."""
        return None

    def family(self, tiling: Tiling, rows: int) -> str:
        """Return the name of the tiles for ``rows`` rows, as printed in plans; empty without tiles."""
        return tiling.family(rows)

    def regions(self, query: PipelineQuery) -> Regions:
        """Return the maximum memory of a pass, by name."""
        ...

    def build(self, parts: PipelineParts) -> Pipeline:
        """Return the pipeline of a layer."""
        ...
