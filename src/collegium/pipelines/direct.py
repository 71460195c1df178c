"""Few assignments on a GPU: rows stay in the order of the ids, so nothing is sorted before or after the experts.

The bits are those of ``split``, since the bits of a row depend on no other row.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..experts import Tiling
from ..ops.weighted_sum import weighted_sum, weighted_sum_regions
from ..runtime.memory import Memory, Regions, part, with_prefix
from ..types import Routing
from .base import PipelineKind, PipelineParts, PipelineQuery

__all__ = ["Direct", "DirectKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Direct:
    """No dispatcher: the sum reads the ids."""

    parts: PipelineParts

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
        parts = self.parts
        ids, weights = routing.topk_ids.contiguous(), routing.topk_weights.contiguous()
        rows = parts.experts.run_unsorted(x, ids, part(memory, "experts"))
        if parts.after_expert is not None:
            rows = parts.after_expert(rows)
        added = shared() if shared else None
        return weighted_sum(rows, ids, weights, dtype, shared=added, out=out, experts=parts.num_experts, memory=memory)

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return those of the experts' kernel for the assignments of ``tokens`` tokens."""
        return self.parts.experts.tiling.variants(tokens * self.parts.top_k, unsorted=True)


class DirectKind(PipelineKind):
    """The row of the table: as many tokens as the kernel says are faster unsorted."""

    name = "direct"
    does = "unsorted"

    def refuse(self, asked: PipelineQuery) -> str | None:
        """Refuse devices, dispatchers, kernels and routings that need the rows in order."""
        device, rule = asked.problem.device.kind, asked.problem.spec.routing
        if device != "cuda":
            return f"asked for {device}; it needs a CUDA GPU"
        if asked.dispatcher.name != "local":
            return f"asked for the dispatcher {asked.dispatcher.name}; it has none, so every expert must be here"
        if rule.weight_on_input:
            return "asked for router weights on the input; it weights rows after the experts"
        if not asked.tiling.unsorted_tokens(rule.top_k):
            return f"{asked.kernel.name} with top-{rule.top_k} runs no number of tokens faster unsorted"
        return None

    def max_tokens(self, tiling: Tiling, top_k: int) -> int | None:
        """Return what the kernel says."""
        return tiling.unsorted_tokens(top_k)

    def regions(self, asked: PipelineQuery) -> Regions:
        """Return those of the experts' kernel, and of the sum where it is not written to the caller's tensor."""
        spec, tokens = asked.problem.spec, asked.problem.limits.max_tokens
        inside = spec.latent_size is not None
        own = weighted_sum_regions(tokens, spec.expert_hidden_size, torch.float32) if inside else {}
        return own | with_prefix("experts", asked.kernel.regions(asked.experts))

    def build(self, parts: PipelineParts) -> Direct:
        """Return the pipeline."""
        return Direct(parts=parts)
