"""Few assignments on a GPU: rows stay in the order of the ids, so nothing is sorted before or after the experts.

The bits are those of ``split``, since the bits of a row do not depend on other rows.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..adapters import TokenAdapters
from ..experts import Tiling
from ..ops.weighted_sum import weighted_sum, weighted_sum_regions
from ..runtime.memory import Memory, Regions, part, with_prefix
from ..types import Routing
from .base import PipelineKind, PipelineParts, PipelineQuery

__all__ = ["Direct", "DirectKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Direct:
    """Runs the experts on unsorted rows; there is no dispatcher, the weighted sum reads the ids."""

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
        parts = self.parts
        ids = routing.topk_ids.contiguous()
        weights = routing.topk_weights.contiguous()
        rows = parts.experts.run_unsorted(x, ids, part(memory, "experts"), adapters)
        if parts.after_expert is not None:
            rows = parts.after_expert(rows)
        shared_rows = None if shared is None else shared()
        return weighted_sum(
            rows, ids, weights, dtype, shared=shared_rows, out=out, experts=parts.num_experts, memory=memory
        )

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return the variants of the experts' kernel for the assignments of ``tokens`` tokens."""
        return self.parts.experts.tiling.variants(tokens * self.parts.top_k, unsorted=True)


class DirectKind(PipelineKind):
    """Serves as many tokens as the kernel runs faster unsorted."""

    name = "direct"
    description = "unsorted"

    def refuse(self, query: PipelineQuery) -> str | None:
        """Refuse devices, dispatchers, kernels and routing rules that need sorted rows."""
        device = query.problem.device.kind
        rule = query.problem.spec.routing
        if device != "cuda":
            return f"the device is {device}; it needs a CUDA GPU"
        if query.dispatcher.name != "local":
            return f"the dispatcher is {query.dispatcher.name}; it needs all experts on this rank"
        if rule.weight_on_input:
            return "the router weights multiply the input; it applies them after the experts"
        if not query.tiling.unsorted_tokens(rule.top_k):
            return f"{query.kernel.name} with top-{rule.top_k} is not faster unsorted for any number of tokens"
        return None

    def max_tokens(self, tiling: Tiling, top_k: int) -> int | None:
        """Return the largest number of tokens that the kernel runs faster unsorted."""
        return tiling.unsorted_tokens(top_k)

    def family(self, tiling: Tiling, rows: int) -> str:
        """Return the name of the tiles for unsorted rows."""
        return tiling.family(rows, unsorted=True)

    def regions(self, query: PipelineQuery) -> Regions:
        """Return the regions of the experts' kernel, and of the sum where the experts have a latent width."""
        spec = query.problem.spec
        regions: Regions = {}
        if spec.latent_size is not None:  # otherwise the sum is written to the caller's tensor
            regions |= weighted_sum_regions(query.problem.limits.max_tokens, spec.expert_hidden_size, torch.float32)
        return regions | with_prefix("experts", query.kernel.regions(query.experts))

    def build(self, parts: PipelineParts) -> Direct:
        """Return the pipeline."""
        return Direct(parts=parts)
