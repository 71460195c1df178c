"""Two halves of a batch: rows of one half travel between ranks while the experts run the other half."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..adapters import TokenAdapters
from ..problem import Overrides, Problem
from ..runtime.memory import Memory
from ..runtime.profiler_ranges import step
from ..runtime.side_stream import ForkedStream
from ..types import ContiguousBatch, Routing
from .base import PipelineParts
from .steps import listed_tiles, run_experts

__all__ = ["HalfBatches", "no_half_batches"]


def no_half_batches(problem: Problem, overrides: Overrides) -> str | None:
    """Return why batches of ``problem`` do not run as two halves, whatever the dispatcher is, or None."""
    placement = problem.placement
    if placement is None or placement.world_size == 1:
        return f"the placement is {placement or 'one rank'}, so no token travels to another rank"
    ranks = placement.world_size
    if placement.same_tokens:
        return f"each of {ranks} ranks runs its share of the same tokens, and then waits for the outputs of all shares"
    if placement.spare:
        return (
            f"load balancing may use the {placement.spare} spare slots of each rank; it counts assignments, and two "
            "halves would add to the same counts on two streams"
        )
    if overrides.pipeline not in (None, "split"):
        return f"pipeline {overrides.pipeline} was forced, and half batches are for split"
    if not overrides.allow_slow:
        # benchmarks/results/parallel_h200.csv
        return (
            "two halves have not been measured to be faster than a whole batch: both read all weights and are launched "
            "separately (1.5x slower with 96 rows for each expert of V4-Flash, two H200); "
            "Overrides(microbatches=2, allow_slow=True) runs them all the same"
        )
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfBatches:
    """``Split`` for two halves of a batch, the second one on a side stream of the GPU.

    Every rank exchanges in the same order: tokens of the first half, tokens of the second half, rows of the first half,
    rows of the second half. So the second half's tokens travel while the first half's experts run, and the first half's
    rows while the second half's experts run. On a CPU only rows travel in the background.
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
        """Return the weighted sums ``[T, H]``; see ``Pipeline``. Both halves run in fresh memory."""
        assert adapters is None, "the plan refuses adapters over ranks"
        result = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
        side = ForkedStream(x.device)
        try:
            self._run(x, routing, side, shared, result)
        finally:
            side.join()
        return result

    def _run(
        self, x: Tensor, routing: Routing, side: ForkedStream, shared: Callable[[], Tensor | None] | None, out: Tensor
    ) -> None:
        """Write the weighted sums to ``out``."""
        dispatcher, overlap = self.parts.dispatcher, self.parts.overlap_shared
        first, second = self._halves(x.shape[0])
        with step("first half: dispatch", x.device):
            first_batch, first_handle = self._dispatch(x, routing, first)
        with step("first half: experts", x.device):
            first_rows = run_experts(self.parts, first_batch, None)
        with side(), step("second half: dispatch", x.device):
            second_batch, second_handle = self._dispatch(x, routing, second)
        with step("first half: send", x.device):
            first_return = dispatcher.send_back(first_rows, first_handle, overlap=True)
        with side(), step("second half: experts", x.device):
            second_rows = run_experts(self.parts, second_batch, None)
        with side(), step("second half: send", x.device):
            second_return = dispatcher.send_back(second_rows, second_handle, overlap=overlap)
        if not overlap:
            side.join()
        shared_rows = None if shared is None else shared()
        side.catch_up()
        with step("first half: combine", x.device):
            self._combine(first_return, first_handle, first, shared_rows, out)
        with side(), step("second half: combine", x.device):
            self._combine(second_return, second_handle, second, shared_rows, out)

    def _halves(self, tokens: int) -> tuple[slice, slice]:
        """Return the tokens of each half; one half has all tokens of a batch that the dispatcher refuses."""
        end = tokens if tokens > self.parts.half_batches else -(-tokens // 2)
        return slice(end), slice(end, tokens)

    def _dispatch(self, x: Tensor, routing: Routing, half: slice) -> tuple[ContiguousBatch, Any]:
        """Send the tokens of ``half`` to the ranks of their experts."""
        dispatcher = self.parts.dispatcher
        half_routing = Routing(topk_ids=routing.topk_ids[half], topk_weights=routing.topk_weights[half])
        block_t = listed_tiles(self.parts.experts, dispatcher.rows(*half_routing.topk_ids.shape), x)
        return dispatcher.dispatch(x[half], half_routing, block_t=block_t)

    def _combine(self, returning: Any, handle: Any, half: slice, shared: Tensor | None, out: Tensor) -> None:
        """Write the weighted sums of the tokens of ``half`` to their rows of ``out``."""
        shared_half = None if shared is None else shared[half]
        self.parts.dispatcher.combine(returning, handle, dtype=out.dtype, shared=shared_half, out=out[half])

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return the variants of the experts' kernel for the rows of both halves of ``tokens`` tokens."""
        found: set[Hashable] = set()
        for half in self._halves(tokens):
            rows = self.parts.dispatcher.rows(half.stop - (half.start or 0), self.parts.top_k)
            found |= self.parts.experts.tiling.variants(rows, unsorted=False)
        return frozenset(found)
