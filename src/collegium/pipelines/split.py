"""Dispatch, run, combine: three replaceable steps, for any number of tokens."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..adapters import TokenAdapters
from ..parallel import SymmetricDispatcher
from ..runtime.memory import Memory, Regions, with_prefix
from ..runtime.profiler_ranges import step
from ..types import Routing
from .base import Pipeline, PipelineKind, PipelineParts, PipelineQuery
from .half_batches import HalfBatches
from .steps import listed_tiles, run_experts

__all__ = ["OverlappedSplit", "Split", "SplitKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Dispatch, experts, return of rows, shared expert, combine.

    The shared expert runs while rows travel, unless the plan is sequential. The router weight is applied in
    ``combine``, or on the experts' input, and nowhere else.
    """

    parts: PipelineParts

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
        """Return the weighted sums ``[T, H]``; see ``Pipeline``."""
        dispatcher = self.parts.dispatcher
        with step("dispatch", x.device):
            block_t = listed_tiles(self.parts.experts, dispatcher.rows(*routing.topk_ids.shape), x)
            batch, handle = dispatcher.dispatch(x, routing, memory, block_t=block_t)
            batch = batch if adapters is None else replace(batch, adapters=adapters)
        with step("experts", x.device):
            rows = run_experts(self.parts, batch, memory)
        shared_rows = None
        if shared is not None and not self.parts.overlap_shared:
            shared_rows = shared()
        overlap = shared is not None and self.parts.overlap_shared
        with step("combine: send", x.device):
            returning = dispatcher.send_back(rows, handle, memory, overlap=overlap)
        if shared is not None and overlap:
            shared_rows = shared()
        with step("combine", x.device):
            return dispatcher.combine(returning, handle, memory, dtype=dtype, shared=shared_rows, out=out)

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return the variants of the experts' kernel for the rows of ``tokens`` tokens."""
        rows = self.parts.dispatcher.rows(tokens, self.parts.top_k)
        return self.parts.experts.tiling.variants(rows, unsorted=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlappedSplit:
    """Send, shared expert, receive, experts, combine: for ranks that read each other's memory.

    The shared expert runs while tokens are on their way, and while other ranks are late, unless the plan is sequential.
    """

    parts: PipelineParts
    dispatcher: SymmetricDispatcher

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
        """Return the weighted sums ``[T, H]``; see ``Pipeline``."""
        assert adapters is None, "the plan refuses adapters over ranks"
        experts = self.parts.experts
        with step("dispatch: send", x.device):
            posted = self.dispatcher.send(x, routing, memory, codes=experts.input_codes)
        shared_rows = None
        if shared is not None and self.parts.overlap_shared:
            shared_rows = shared()
        # ``after_expert`` has to see the rows before other ranks do.
        storing = experts.output_spec(x.dtype) if self.parts.after_expert is None else None
        with step("dispatch: receive", x.device):
            block_t = listed_tiles(experts, self.dispatcher.expected_rows(posted), x)
            batch, handle = self.dispatcher.receive(posted, memory, block_t=block_t, storing=storing)
        with step("experts", x.device):
            rows = run_experts(self.parts, batch, memory)
        if shared is not None and not self.parts.overlap_shared:
            shared_rows = shared()
        with step("combine", x.device):
            return self.dispatcher.combine(rows, handle, memory, dtype=dtype, shared=shared_rows, out=out)

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return the variants of the experts' kernel for the rows of ``tokens`` tokens on every rank."""
        rows = self.dispatcher.rows(tokens, self.parts.top_k)
        return self.parts.experts.tiling.variants(rows, unsorted=False)


class SplitKind(PipelineKind):
    """Refuses nothing and serves any number of tokens."""

    name = "split"
    description = "sorted by expert"

    def regions(self, query: PipelineQuery) -> Regions:
        """Return the regions of the dispatcher and of the experts' kernel."""
        regions = query.dispatcher.regions(query.problem, lists=bool(query.tiling.block_t(1)))
        return regions | with_prefix("experts", query.kernel.regions(query.experts))

    def build(self, parts: PipelineParts) -> Pipeline:
        """Return the pipeline for the dispatcher of ``parts``."""
        if isinstance(parts.dispatcher, SymmetricDispatcher):
            return OverlappedSplit(parts=parts, dispatcher=parts.dispatcher)
        if parts.half_batches:
            return HalfBatches(parts=replace(parts, dispatcher=parts.dispatcher.for_halves()))
        return Split(parts=parts)
