"""Experts in host memory: decide, copy what is missing, run the slots, in rounds where a batch needs more experts.

The bits are those of ``split``: every row is stored at the place of its assignment, whatever its round, and the sum
runs once, in slot order.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..adapters import TokenAdapters
from ..experts import Tiling
from ..experts.paging.paged import PagedExperts
from ..ops.paging import copy_experts, decide, decide_regions, round_count
from ..ops.permute import Owners, permute_regions
from ..ops.weighted_sum import weighted_sum, weighted_sum_regions
from ..parallel.local import Local
from ..runtime.memory import Memory, Regions, alloc, part, with_prefix
from ..types import Routing
from .base import Pipeline, PipelineKind, PipelineParts, PipelineQuery
from .steps import listed_tiles

__all__ = ["Paged", "PagedKind"]


class _RoundMemory:
    """The memory of all rounds, which follow each other: each takes the buffers of the first one."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}
        self._parts: dict[str, _RoundMemory] = {}

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the buffer ``name``."""
        key = name, shape, dtype
        if key not in self._buffers:
            self._buffers[key] = self._memory.alloc(name, shape, dtype)
        return self._buffers[key]

    def part(self, name: str) -> Memory:
        """Return the memory of a part."""
        if name not in self._parts:
            self._parts[name] = _RoundMemory(self._memory.part(name))
        return self._parts[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paged:
    """Runs the experts of ``PagedExperts``.

    origin: ``[1]`` int64, 0: rows are stored in this GPU's memory.
    """

    parts: PipelineParts
    experts: PagedExperts
    weight_on_input: bool
    local: Local = field(init=False)
    origin: Tensor = field(init=False)

    def __post_init__(self) -> None:
        slots = self.experts.tables.slot_expert
        local = Local(num_experts=slots.numel(), weight_on_input=self.weight_on_input)
        object.__setattr__(self, "local", local)
        with torch.inference_mode(False):
            object.__setattr__(self, "origin", torch.zeros(1, dtype=torch.int64, device=slots.device))

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
        assert adapters is None, "the layer refuses adapters for paged experts"
        paged, experts = self.experts, self.experts.tables.expert_slot.numel()
        ids = routing.topk_ids.contiguous()
        weights = routing.topk_weights.contiguous()
        slot_ids = decide(ids, paged.tables, paged.policy.update, part(memory, "paging"))
        if self._unsorted(slot_ids):
            copy_experts(paged.segments, paged.tables, 0)
            rows = paged.resident.run_unsorted(x, slot_ids[0], part(memory, "experts"))
        else:
            rows = self._run_rounds(x, slot_ids, weights, memory)
        if self.parts.after_expert is not None:
            rows = self.parts.after_expert(rows)
        shared_rows = None if shared is None else shared()
        factors = None if self.weight_on_input else weights
        return weighted_sum(rows, ids, factors, dtype, shared=shared_rows, out=out, experts=experts, memory=memory)

    def _unsorted(self, slot_ids: Tensor) -> bool:
        """Return whether the kernel runs slots ``[N, T, K]`` faster without sorting them."""
        rounds, tokens, top_k = slot_ids.shape
        most = self.experts.tiling.unsorted_tokens(top_k)
        return rounds == 1 and not self.weight_on_input and 0 < tokens <= most

    def _run_rounds(self, x: Tensor, slot_ids: Tensor, weights: Tensor, memory: Memory | None) -> Tensor:
        """Return the rows ``[T * K, H]`` in the order of assignments; those without an expert are uninitialised."""
        paged, (rounds, tokens, top_k) = self.experts, slot_ids.shape
        output = paged.resident.output_spec(x.dtype)
        assert output is not None, "the plan pages only kernels that store rows at other places"
        width, row_dtype = output
        rows = alloc(part(memory, "experts"), "rows", (tokens * top_k, width), row_dtype, x.device)
        shared_memory = None if memory is None else _RoundMemory(memory)
        expected = -(-tokens * top_k // rounds)
        block_t = listed_tiles(paged.resident, expected, x)
        for turn, local_ids in enumerate(slot_ids):
            copy_experts(paged.segments, paged.tables, turn)
            routing = Routing(topk_ids=local_ids, topk_weights=weights)
            owners = Owners(rows, self.origin)
            batch, _ = self.local.dispatch(x, routing, shared_memory, block_t=block_t, owners=owners)
            paged.resident.run(replace(batch, rows=expected), part(shared_memory, "experts"))
        return rows

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return the variants of the experts' kernel, and the number of rounds, which the decision is compiled for."""
        top_k, tables = self.parts.top_k, self.experts.tables
        rows = tokens * top_k
        rounds = round_count(rows, tables.expert_slot.numel(), tables.slot_expert.numel())
        unsorted = rounds == 1 and not self.weight_on_input and tokens <= self.experts.tiling.unsorted_tokens(top_k)
        tiles = self.experts.tiling.variants(rows if unsorted else -(-rows // rounds), unsorted=unsorted)
        return frozenset({(rounds, unsorted, variant) for variant in tiles})


class PagedKind(PipelineKind):
    """Serves any number of tokens of layers with more experts than slots, and no other layer."""

    name = "paged"
    description = "missing experts are copied from host memory"

    def refuse(self, query: PipelineQuery) -> str | None:
        """Refuse layers whose experts are all on the GPU."""
        return None if query.problem.gpu_slots is not None else "all experts are on the device"

    def family(self, tiling: Tiling, rows: int) -> str:
        """Return the name of the tiles of a batch that runs in one round."""
        return tiling.family(rows)

    def regions(self, query: PipelineQuery) -> Regions:
        """Return the regions of the decision, of sorting, of the experts' kernel and of the sum."""
        problem, spec = query.problem, query.problem.spec
        tokens, rule = problem.limits.max_tokens, spec.routing
        count = tokens * rule.top_k
        regions = with_prefix("paging", decide_regions(count, spec.num_experts, problem.slots))
        regions |= permute_regions(
            count, problem.slots, block_t=(16, 16), weights=rule.weight_on_input, row_offsets=True
        )
        if spec.latent_size is not None:  # otherwise the sum is written to the caller's tensor
            regions |= weighted_sum_regions(tokens, spec.expert_hidden_size, torch.float32)
        return regions | with_prefix("experts", query.kernel.regions(query.experts))

    def build(self, parts: PipelineParts) -> Pipeline:
        """Return the pipeline for the paged experts of ``parts``."""
        assert isinstance(parts.experts, PagedExperts)
        return Paged(parts=parts, experts=parts.experts, weight_on_input=_weights_input(parts))


def _weights_input(parts: PipelineParts) -> bool:
    return isinstance(parts.dispatcher, Local) and parts.dispatcher.weight_on_input
