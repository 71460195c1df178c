"""Experts in host memory: decide, copy what is missing, run the slots, in rounds where a batch needs more experts.

The bits are those of ``split``: every row is stored at the place of its assignment, whatever its round, and the sum
runs once, in slot order.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..adapters import TokenAdapters
from ..experts import Tiling
from ..experts.paging.paged import PagedExperts
from ..ops.paging import Schedule, copy_experts, decide, decide_regions, schedule
from ..ops.permute import Owners, permute_regions
from ..ops.weighted_sum import weighted_sum, weighted_sum_regions
from ..parallel.local import Local
from ..runtime.launch import noted
from ..runtime.memory import FreshMemory, Memory, Regions, alloc, part, with_prefix
from ..runtime.side_stream import ForkedStream
from ..types import Routing
from .base import Pipeline, PipelineKind, PipelineParts, PipelineQuery
from .steps import listed_tiles

__all__ = ["Paged", "PagedKind"]

_REPLAYED = 1024  # assignments up to which the host's time matters more than that of copies next to products


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
        paged, rounds = self.experts, self._schedule(*routing.topk_ids.shape)
        ids = routing.topk_ids.contiguous()
        weights = routing.topk_weights.contiguous()
        slot_ids = decide(ids, paged.tables, paged.policy.update, rounds, part(memory, "paging"))
        if rounds.first_miss == 0:
            copy_experts(paged.segments, paged.tables, 0)
            rows = paged.resident.run_unsorted(x, slot_ids[0], part(memory, "experts"))
        else:
            rows = self._run_rounds(x, slot_ids, weights, rounds, memory)
        if self.parts.after_expert is not None:
            rows = self.parts.after_expert(rows)
        shared_rows = None if shared is None else shared()
        factors = None if self.weight_on_input else weights
        experts = paged.tables.expert_slot.numel()
        return weighted_sum(rows, ids, factors, dtype, shared=shared_rows, out=out, experts=experts, memory=memory)

    def _schedule(self, tokens: int, top_k: int) -> Schedule:
        """Return the rounds of a batch: one for as many tokens as the kernel runs faster without sorting them."""
        tables, most = self.experts.tables, self.experts.tiling.unsorted_tokens(top_k)
        serial = 0 < tokens <= most and not self.weight_on_input
        return schedule(tokens * top_k, tables.expert_slot.numel(), tables.slot_expert.numel(), serial=serial)

    def _run_rounds(
        self, x: Tensor, slot_ids: Tensor, weights: Tensor, rounds: Schedule, memory: Memory | None
    ) -> Tensor:
        """Return the rows ``[T * K, H]`` in the order of assignments; those without an expert are uninitialised.

        Copies run on a second stream: in round 0 those that need no slot of it, with two groups of slots those of the
        round that follows.
        """
        count = slot_ids[0].numel()
        rows = self._rows(x, count, memory)
        if count == 0:
            return rows
        if count > _REPLAYED:
            noted(None)  # replayed launches have one stream
        round_memory = None if memory is None else _RoundMemory(memory)
        expected = self._expected_rows(count)
        copies = ForkedStream(x.device)
        self._copy(copies, 1, "ready")
        for turn, local_ids in enumerate(slot_ids):
            if turn == 1 or (turn > 1 and rounds.groups == 1):
                copies.catch_up()
                self._copy(copies, turn, "waiting" if turn == 1 else "all")
            if turn > 0:
                copies.join()
            if rounds.groups == 2 and 0 < turn < rounds.rounds - 1:
                copies.catch_up()
                self._copy(copies, turn + 1)
            routing = Routing(topk_ids=local_ids, topk_weights=weights)
            self._run_round(x, routing, rows, expected, round_memory)
        return rows

    def _copy(self, stream: ForkedStream, turn: int, which: Literal["all", "ready", "waiting"] = "all") -> None:
        with stream():
            copy_experts(self.experts.segments, self.experts.tables, turn, which)

    def _rows(self, x: Tensor, count: int, memory: Memory | None) -> Tensor:
        """Return the tensor for the experts' rows of ``count`` assignments, in their order."""
        output = self.experts.resident.output_spec(x.dtype)
        assert output is not None, "the plan pages only kernels that store rows at other places"
        width, row_dtype = output
        return alloc(part(memory, "experts"), "rows", (count, width), row_dtype, x.device)

    def _run_round(self, x: Tensor, routing: Routing, rows: Tensor, expected: int, memory: Memory | None) -> None:
        """Store the rows of the assignments whose slot is not -1. expected: how many they are likely to be."""
        resident, owners = self.experts.resident, Owners(rows, self.origin)
        block_t = listed_tiles(resident, expected, x)
        batch, _ = self.local.dispatch(x, routing, memory, block_t=block_t, owners=owners)
        resident.run(replace(batch, rows=expected), part(memory, "experts"))

    def compile(self, x: Tensor) -> None:
        """Compile the products for as many tokens as ``x [T, H]``, which are zeros.

        Experts stay where they are, so several threads may do this at the same time, while no pass runs.
        """
        (tokens, _), top_k = x.shape, self.parts.top_k
        rounds, memory = self._schedule(tokens, top_k), FreshMemory(x.device)
        slots = self.experts.tables.slot_expert.numel()
        ids = torch.arange(tokens * top_k, dtype=torch.int32, device=x.device).view(tokens, top_k) % slots
        if rounds.first_miss == 0:
            self.experts.resident.run_unsorted(x, ids, memory)
            return
        routing = Routing(topk_ids=ids, topk_weights=torch.ones(ids.shape, device=x.device))
        expected = self._expected_rows(ids.numel())
        self._run_round(x, routing, self._rows(x, ids.numel(), memory), expected, memory)

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return the variants of the experts' kernel, and the rounds, which the decision is compiled for."""
        count = tokens * self.parts.top_k
        rounds = self._schedule(tokens, self.parts.top_k)
        serial = rounds.first_miss == 0
        tiles = self.experts.tiling.variants(count if serial else self._expected_rows(count), unsorted=serial)
        return frozenset((rounds.rounds, rounds.groups, variant) for variant in tiles)

    def _expected_rows(self, count: int) -> int:
        """Return how many of ``count`` rows a round has whose slots are all used: experts have equally many."""
        tables = self.experts.tables
        needed = max(1, min(count, tables.expert_slot.numel()))
        return -(-count * min(needed, tables.slot_expert.numel()) // needed)


class PagedKind(PipelineKind):
    """Serves any number of tokens of layers with more experts than slots, and no other layer."""

    name = "paged"
    description = "missing experts are copied from host memory"

    def refuse(self, query: PipelineQuery) -> str | None:
        """Refuse layers whose experts are all on the GPU."""
        return None if query.problem.gpu_slots is not None else "all experts are on the device"

    def family(self, tiling: Tiling, rows: int) -> str:
        """Return nothing: each round has the tiles for its rows."""
        return ""

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
