"""Experts split over ranks: every rank is sent all tokens, computes its own experts' rows, and sends each row back.

Per call the ranks tell each other how many tokens they have, gather tokens and places, and reduce-scatter the rows: of
each assignment exactly one rank adds a row that is not zero, so the sum is that row, bit for bit. The weighted sum is
then the one of a single rank, in slot order. With a reduced combine each rank sends one row for each token instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..ops.weighted_sum import weighted_sum
from .collectives import exchanged, gathered, scattered
from .combine import describe_return, return_bytes
from .expert_parallel import Across, AcrossKind
from .message_format import EMPTY, sent_words, there_bytes
from .traffic import OutgoingTokens, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory
    from ..types import ContiguousBatch, Routing

__all__ = ["AllGather", "AllGatherKind", "GatherHandle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherHandle:
    """slots: ``[W * most, K]``, the row of every rank's assignments here, negative for those computed elsewhere.

    ids, weights: of this rank's own tokens ``[T, K]``; weights None where they multiplied the input. arrived: weights
    of all tokens ``[W * most, K]``, None where this rank multiplies by none.
    """

    slots: Tensor
    ids: Tensor
    weights: Tensor | None
    arrived: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGather(Across):
    """Some experts are here."""

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, GatherHandle]:
        """Gather every rank's tokens and sort the assignments of this rank's experts.

        Raises InputError on every rank where one brings more than ``limit`` tokens or another top-k.
        """
        ids = routing.topk_ids
        top_k = ids.shape[1]
        self.map.record(ids)
        most = max(count for count, *_ in self.met(ids.shape))
        messages = self.wire_format.messages(x, self.map.choose(ids), routing.topk_weights)
        arrived = self.wire_format.read(
            gathered(messages, most, EMPTY, group=self.group, phase="all_gather dispatch"), top_k
        )
        own = self.wire_format.routing(arrived, self.map.local(arrived.places))
        batch, inner = self.inner.dispatch(arrived.x, own, block_t=block_t)
        batch = replace(batch, rows=self.rows(most, top_k), scale=arrived.scale, dtype=x.dtype)
        carried = self.inner.weight_on_input
        return batch, GatherHandle(
            slots=inner.slots,
            ids=ids.contiguous(),
            weights=None if carried else routing.topk_weights,
            arrived=inner.weights,
        )

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
        """Return ``[T, H]`` of this rank's own tokens, with the bits of a single rank unless it is reduced."""
        phase, ids = "all_gather combine", handle.ids
        if self.reduced is not None:
            parts = self.reduced.parts(rows, handle.slots, handle.arrived)
            came = exchanged(parts, group=self.group, phase=phase)
            places = torch.arange(came.shape[0], device=ids.device).view(self.map.world_size, -1).t()[: ids.shape[0]]
            return self.reduced.sum(came, places, dtype=dtype, shared=shared, out=out)
        found, wide = handle.slots.reshape(-1), rows.shape[1]
        here = rows.new_zeros(found.numel(), wide)
        if rows.shape[0]:
            here = rows.index_select(0, found.clamp(min=0)).masked_fill_((found < 0)[:, None], 0)
        own = scattered(here, group=self.group, phase=phase)[: ids.numel()]
        return weighted_sum(own, ids, handle.weights, dtype, shared=shared, out=out, experts=self.map.num_experts)


class AllGatherKind(AcrossKind):
    """The row of the table."""

    name = "all_gather"

    def wire_format(self, problem: Problem) -> str:
        """Return what travels."""
        return f"{sent_words(problem)} to every rank, {describe_return(problem)},"

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return as many messages and rows as the rank with the most tokens has, to every other rank."""
        copies = away.most * (problem.world_size - 1)
        back = copies * (problem.spec.routing.top_k if problem.combine == "exact" else 1)
        return Traffic(copies * there_bytes(problem), back * return_bytes(problem))

    def build(self, problem: Problem) -> AllGather:
        """Return the dispatcher, as ``Across.of`` does."""
        return AllGather.of(self.name, problem)
