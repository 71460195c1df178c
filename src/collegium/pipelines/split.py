"""Dispatch, run, combine: three replaceable steps, for any number of tokens."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..parallel import SymmetricDispatcher
from ..runtime.memory import Memory, Regions, part, with_prefix
from ..runtime.profiler_ranges import step
from ..types import Routing
from .base import PipelineKind, PipelineParts, PipelineQuery

__all__ = ["Split", "SplitKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The router weight is applied in ``combine`` (or on the input) and nowhere else."""

    parts: PipelineParts
    _reaching: SymmetricDispatcher | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Asked once: it takes some 40 microseconds.
        found = self.parts.dispatcher
        object.__setattr__(self, "_reaching", found if isinstance(found, SymmetricDispatcher) else None)

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
        """Return what ``Pipeline`` says."""
        parts, dispatcher, reaching, added = self.parts, self.parts.dispatcher, self._reaching, None
        if reaching is not None:
            with step("dispatch: send", x.device):
                posted = reaching.send(x, routing, memory, codes=parts.experts.input_codes)
            # Beside the tokens on their way, and beside ranks that are late.
            added = shared() if shared else None
            # A user's function sees the rows before they go back.
            storing = parts.experts.output_spec(x.dtype) if parts.after_expert is None else None
            block_t = self._block_t(reaching.expected_rows(posted), x)
            with step("dispatch: receive", x.device):
                batch, handle = reaching.receive(posted, memory, block_t=block_t, storing=storing)
        else:
            with step("dispatch", x.device):
                batch, handle = dispatcher.dispatch(
                    x, routing, memory, block_t=self._block_t(dispatcher.rows(*routing.topk_ids.shape), x)
                )
        with step("experts", x.device):
            made = parts.experts.run(batch, part(memory, "experts"))
            if parts.after_expert is not None:
                made = parts.after_expert(made)
        if reaching is None and shared is not None:
            added = shared()
        with step("combine", x.device):
            return dispatcher.combine(made, handle, memory, dtype=dtype, shared=added, out=out)

    def _block_t(self, rows: int, x: Tensor) -> tuple[int, ...]:
        # Kernels that walk token tiles get their lists from the launch that orders the rows.
        return self.parts.experts.tiling.block_t(rows) if x.is_cuda else ()

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return those of the experts' kernel for the rows of ``tokens`` tokens."""
        rows = self.parts.dispatcher.rows(tokens, self.parts.top_k)
        return self.parts.experts.tiling.variants(rows, unsorted=False)


class SplitKind(PipelineKind):
    """The row of the table: it refuses nothing and serves any number of tokens."""

    name = "split"
    does = "sorted by expert"

    def regions(self, asked: PipelineQuery) -> Regions:
        """Return those of the dispatcher and of the experts' kernel."""
        own = asked.dispatcher.regions(asked.problem, lists=bool(asked.tiling.block_t(1)))
        return own | with_prefix("experts", asked.kernel.regions(asked.experts))

    def build(self, parts: PipelineParts) -> Split:
        """Return the pipeline."""
        return Split(parts=parts)
