"""Experts split over ranks: every rank is sent all tokens, computes its own experts' rows, and sends each row back.

Per call the ranks tell each other how many tokens they have, gather tokens and ids, and reduce-scatter the rows: of
each assignment exactly one rank adds a row that is not zero, so the sum is that row, bit for bit. The weighted sum is
then the one of a single rank, in slot order. Tokens and rows travel in full, K rows for each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed

from ..errors import InputError
from ..ops.weighted_sum import weighted_sum
from ..types import Routing
from .local import LocalKind
from .partial import Partial, PartialKind

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory, Regions
    from ..types import ContiguousBatch

__all__ = ["AllGather", "AllGatherKind", "GatherHandle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherHandle:
    """slots: ``[W * most, K]``, the row of every rank's assignments here, negative for those computed elsewhere.

    ids, weights: of this rank's own tokens ``[T, K]``; weights None where they multiplied the input.
    """

    slots: Tensor
    ids: Tensor
    weights: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGather:
    """Some experts are here. limit: the most tokens a rank may bring. experts: on all ranks.

    The group is torch's default one, asked for at every call: a process that still holds a group at its end aborts.
    """

    partial: Partial
    limit: int
    experts: int

    def rows(self, tokens: int, top_k: int) -> int:
        """Return this rank's share of the assignments of as many tokens on every rank."""
        return self.partial.rows(tokens * distributed.get_world_size(), top_k)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, GatherHandle]:
        """Gather every rank's tokens and sort the assignments of this rank's experts.

        Raises InputError on every rank where one brings more than ``limit`` tokens or another top-k. Waits for the
        device, to know how many tokens there are.
        """
        most = self._most(x.shape[0], routing.topk_ids.shape[1], x.device)
        ids = self._gathered(routing.topk_ids.to(torch.int64), most, -1)
        carried = self.partial.inner.weight_on_input
        weights = self._gathered(routing.topk_weights.float(), most, 0) if carried else torch.empty(ids.shape)
        batch, inner = self.partial.dispatch(
            self._gathered(x, most, 0), Routing(topk_ids=ids, topk_weights=weights), None, block_t=block_t
        )
        own = None if carried else routing.topk_weights
        return batch, GatherHandle(slots=inner.slots, ids=routing.topk_ids.contiguous(), weights=own)

    def combine(
        self,
        rows: Tensor,
        handle: GatherHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]`` of this rank's own tokens, with the bits of a single rank."""
        found, wide = handle.slots.reshape(-1), rows.shape[1]
        here = rows.new_zeros(found.numel(), wide)
        if rows.shape[0]:
            here = rows.index_select(0, found.clamp(min=0)).masked_fill_((found < 0)[:, None], 0)
        own = self._scattered(here)[: handle.ids.numel()]
        return weighted_sum(own, handle.ids, handle.weights, dtype, shared=shared, out=out, experts=self.experts)

    def _most(self, tokens: int, top_k: int, device: torch.device) -> int:
        """Return the most tokens of a rank."""
        own = torch.tensor([tokens, top_k], device=device)
        found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, own)
        counts = torch.stack(found).tolist()
        if any(count > self.limit or k != top_k for count, k in counts):
            said = "; ".join(f"rank {rank}: {count} tokens, top-{k}" for rank, (count, k) in enumerate(counts))
            raise InputError(
                f"all_gather: every rank needs the same top-k and at most max_tokens={self.limit} tokens, found {said};"
                " plan for more tokens, or call with fewer on every rank"
            )
        return max(count for count, _ in counts)

    def _gathered(self, own: Tensor, most: int, fill: float) -> Tensor:
        """Return every rank's rows ``[W * most, ...]``, short ones filled up."""
        padded = own.new_full((most, *own.shape[1:]), fill)
        padded[: own.shape[0]] = own
        found = [torch.empty_like(padded) for _ in range(distributed.get_world_size())]
        if padded.numel():
            distributed.all_gather(found, padded)
        return torch.cat(found)

    def _scattered(self, rows: Tensor) -> Tensor:
        """Return this rank's part of the sum over ranks of ``rows``, whose first dimension all ranks share."""
        world = distributed.get_world_size()
        if not rows.numel():
            return rows.chunk(world)[0]
        own = rows.new_empty(rows.shape[0] // world, rows.shape[1])
        distributed.reduce_scatter(own, list(rows.chunk(world)))
        return own


class AllGatherKind:
    """The row of the table: any backend of torch.distributed, over all of its ranks."""

    name = "all_gather"
    capturable = False
    together = True
    wire_format = "tokens and rows in the layer's dtype"

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Refuse one rank, placements that tell of no other rank, slices, replicas, and ranks without an expert."""
        placed = problem.placement
        if placed is None or placed.world_size == 1:
            return "asked for one rank; it exchanges tokens between ranks"
        if not placed.ranks:
            return f"asked for {placed} without Placement.ranks; it has to know what every rank holds"
        if placed.tp_size > 1:
            return f"asked for {placed}; it splits experts over ranks, not their width"
        empty = [rank for rank, held in enumerate(placed.ranks) if not held]
        if empty:
            return (
                f"asked for {problem.spec.num_experts} experts on {placed.world_size} ranks; rank {empty[0]} has none"
            )
        held = sorted(expert for ids in placed.ranks for expert in ids)
        if held != list(range(problem.spec.num_experts)):
            return (
                f"asked for {len(held)} experts on all ranks of {problem.spec.num_experts}; each has to be there once"
            )
        return None

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return this rank's share of the assignments of as many tokens on every rank."""
        return PartialKind().rows(problem, tokens * problem.world_size)

    def capacity(self, problem: Problem) -> int:
        """Return the assignments of ``max_tokens`` tokens on every rank: all may fall on this rank's experts."""
        return LocalKind().capacity(problem) * problem.world_size

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return none: sizes differ from call to call, so memory is torch's own."""
        return {}

    def build(self, problem: Problem) -> AllGather:
        """Return the dispatcher; all ranks build it at the same time.

        Raises InputError on every rank where torch.distributed has other ranks than the placement, or where the ranks
        were planned for different layers.
        """
        placed = problem.placement
        assert placed is not None
        ready = distributed.is_available() and distributed.is_initialized()
        rank, world = (distributed.get_rank(), distributed.get_world_size()) if ready else (-1, 0)
        if (rank, world) != (placed.rank, placed.world_size):
            found = f"has rank {rank} of {world}" if ready else "is not initialised"
            raise InputError(f"all_gather: asked for {placed}, torch.distributed {found}; launch with torchrun")
        agreed = repr((problem.spec, problem.limits, problem.dtype, problem.activation_format, placed.ranks))
        plans: list[str | None] = [None] * world
        distributed.all_gather_object(plans, agreed)
        other = next((rank for rank, own in enumerate(plans) if own != plans[0]), None)
        if other is not None:
            said = f"{plans[0]} and {plans[other]}"
            raise InputError(f"all_gather: ranks 0 and {other} were planned for different layers: {said}")
        partial = PartialKind().build(problem)
        return AllGather(partial=partial, limit=problem.limits.max_tokens, experts=problem.spec.num_experts)
