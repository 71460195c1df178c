"""Experts split over ranks: a token goes to each rank that has one of its experts, once, and its rows come back.

Per call every rank reads how many tokens and rows it sends to which rank, and tells the others before anything travels;
that is the one wait of the host, and why a CUDA graph cannot capture it. Tokens arrive in the order of ranks, and of
each rank in its own order, which is the order of a single rank that was given all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..ops.permute import permute
from ..ops.weighted_sum import weighted_sum
from .collectives import exchanged
from .combine import describe_return, return_bytes
from .expert_parallel import Across, AcrossKind, by_rank
from .message_format import sent_words, there_bytes
from .traffic import OutgoingTokens, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory
    from ..types import ContiguousBatch, Routing

__all__ = ["AllToAll", "AllToAllKind", "SentHandle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SentHandle:
    """here: ``[N, K]``, the row of each arrived assignment, negative for those computed elsewhere.

    sent, came: rows of the way back, to and from each rank. slots: of each own token's rows ``[T, K]`` among those that
    come back, or of its parts ``[T, W]``. weights: of the own tokens ``[T, K]``, None where they multiplied the input;
    arrived: of the arrived ones ``[N, K]``, None where this rank multiplies by none.
    """

    here: Tensor
    sent: list[int]
    came: list[int]
    slots: Tensor
    weights: Tensor | None
    arrived: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAll(Across):
    """Some experts are here."""

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, SentHandle]:
        """Send tokens to the ranks of their experts and sort the assignments of this rank's.

        Raises InputError on every rank where one brings more than ``limit`` tokens or another top-k.
        """
        ids = routing.topk_ids
        self.map.record(ids)
        places = self.map.choose(ids)
        rank, tokens = by_rank(places, self.map.width, self.map.world_size)
        rows = permute(rank, self.map.world_size)
        counts = torch.stack([tokens.expert_offsets.diff(), rows.expert_offsets.diff()]).tolist()
        table = self.met(ids.shape, counts)
        sent, returned = counts
        came, due = ([told[which][self.map.rank] for *_, told in table] for which in (0, 1))
        messages = self.wire_format.messages(x, places, routing.topk_weights)
        own = messages.index_select(0, tokens.source[: sum(sent)])
        found = exchanged(own, sent, came, group=self.group, phase="all_to_all dispatch")
        arrived = self.wire_format.read(found, ids.shape[1])
        own = self.wire_format.routing(arrived, self.map.local(arrived.places))
        batch, inner = self.inner.dispatch(arrived.x, own, block_t=block_t)
        here, weights = sum(due), batch.input_weights
        # What is known to be elsewhere was sorted behind everything else.
        batch = replace(
            batch,
            source=batch.source[:here],
            input_weights=None if weights is None else weights[:here],
            rows=self.rows(max(count for count, *_ in table), ids.shape[1]),
            scale=arrived.scale,
            dtype=x.dtype,
        )
        reduced = self.reduced is not None
        return batch, SentHandle(
            here=inner.slots,
            sent=came if reduced else due,
            came=sent if reduced else returned,
            slots=tokens.slots if reduced else rows.slots,
            weights=None if self.inner.weight_on_input else routing.topk_weights,
            arrived=inner.weights,
        )

    def combine(
        self,
        rows: Tensor,
        handle: SentHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]`` of this rank's own tokens, with the bits of a single rank unless it is reduced."""
        if self.reduced is not None:
            own = self.reduced.parts(rows, handle.here, handle.arrived)
            return self.reduced.sum(self._back(own, handle), handle.slots, dtype=dtype, shared=shared, out=out)
        found = handle.here.reshape(-1)
        # Arrived assignments are in the order of their tokens, and so are the rows their owner waits for.
        order = torch.nonzero_static(found >= 0, size=sum(handle.sent)).squeeze(1)
        own = rows.index_select(0, found.index_select(0, order))
        return weighted_sum(self._back(own, handle), handle.slots, handle.weights, dtype, shared=shared, out=out)

    def _back(self, own: Tensor, handle: SentHandle) -> Tensor:
        return exchanged(own, handle.sent, handle.came, group=self.group, phase="all_to_all combine")


class AllToAllKind(AcrossKind):
    """The row of the table."""

    name = "all_to_all"

    def wire_format(self, problem: Problem) -> str:
        """Return what travels."""
        return f"{sent_words(problem)} once to each rank of their experts, {describe_return(problem)},"

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return a message a copy, and a row an assignment or a copy."""
        back = away.rows if problem.combine == "exact" else away.copies
        return Traffic(away.copies * there_bytes(problem), back * return_bytes(problem))

    def build(self, problem: Problem) -> AllToAll:
        """Return the dispatcher, as ``Across.of`` does."""
        return AllToAll.of(self.name, problem)
