"""Experts split over ranks: every rank is sent all tokens, computes its own experts' rows, and sends each row back.

Per call the ranks tell each other how many tokens they have, gather tokens and ids, and reduce-scatter the rows: of
each assignment exactly one rank adds a row that is not zero, so the sum is that row, bit for bit. The weighted sum is
then the one of a single rank, in slot order. Tokens and rows travel in full, K rows for each token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from ..ops.weighted_sum import weighted_sum
from ..types import Routing
from .collectives import gathered, scattered
from .expert_map import ExpertMap
from .local import Local, LocalKind
from .meeting import meeting_of
from .partial import PartialKind
from .split import checked_placement, refuse_split

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
    """Some experts are here. limit: the most tokens a rank may bring. group: name of the ranks' process group."""

    inner: Local
    map: ExpertMap
    limit: int
    group: str

    def rows(self, tokens: int, top_k: int) -> int:
        """Return this rank's share of the assignments of as many tokens on every rank."""
        return -(-tokens * self.map.world_size * top_k * self.inner.num_experts // self.map.num_experts)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, GatherHandle]:
        """Gather every rank's tokens and sort the assignments of this rank's experts.

        Raises InputError on every rank where one brings more than ``limit`` tokens or another top-k.
        """
        ids = routing.topk_ids
        self.map.record(ids)
        most, carried = self._most(*ids.shape), self.inner.weight_on_input
        places = self._gathered(self.map.choose(ids), most, -1)
        weights = self._gathered(routing.topk_weights.float(), most, 0) if carried else torch.empty(places.shape)
        own = Routing(topk_ids=self.map.local(places), topk_weights=weights)
        batch, inner = self.inner.dispatch(self._gathered(x, most, 0), own, block_t=block_t)
        batch = replace(batch, rows=-(-places.numel() * self.inner.num_experts // self.map.num_experts))
        own_weights = None if carried else routing.topk_weights
        return batch, GatherHandle(slots=inner.slots, ids=ids.contiguous(), weights=own_weights)

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
        found, wide, ids = handle.slots.reshape(-1), rows.shape[1], handle.ids
        here = rows.new_zeros(found.numel(), wide)
        if rows.shape[0]:
            here = rows.index_select(0, found.clamp(min=0)).masked_fill_((found < 0)[:, None], 0)
        own = scattered(here, group=self.group, phase="all_gather combine")[: ids.numel()]
        return weighted_sum(own, ids, handle.weights, dtype, shared=shared, out=out, experts=self.map.num_experts)

    def _most(self, tokens: int, top_k: int) -> int:
        """Return the most tokens of a rank."""
        counts = meeting_of(self.group).exchange((tokens, top_k), "all_gather dispatch")
        if any(count > self.limit or k != top_k for count, k in counts):
            said = "; ".join(f"rank {rank}: {count} tokens, top-{k}" for rank, (count, k) in enumerate(counts))
            raise InputError(
                f"all_gather: every rank needs the same top-k and at most max_tokens={self.limit} tokens, found {said};"
                " plan for more tokens, or call with fewer on every rank"
            )
        return max(count for count, _ in counts)

    def _gathered(self, own: Tensor, most: int, fill: float) -> Tensor:
        return gathered(own, most, fill, group=self.group, phase="all_gather dispatch")


class AllGatherKind:
    """The row of the table: any backend of torch.distributed, over all of its ranks."""

    name = "all_gather"
    capturable = False
    together = True
    wire_format = "tokens and rows in the layer's dtype"

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Refuse what ``refuse_split`` does."""
        return refuse_split(problem)

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
        placed = checked_placement(self.name, problem)
        return AllGather(
            inner=Local(num_experts=problem.slots, weight_on_input=problem.spec.routing.weight_on_input),
            map=ExpertMap(placed, problem.spec.num_experts, problem.device.place),
            limit=problem.limits.max_tokens,
            group=placed.group,
        )
