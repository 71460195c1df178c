"""``all_to_all`` with room for a fixed count of tokens from each rank to each other, so a CUDA graph can capture it.

A message has its place by its destination and its turn among those that go there; what is left of the room travels
empty. A token that finds no room is never dropped in silence: outside a graph every rank is told before anything is
sent, and raises; inside one its row is NaN, and the count is kept for ``check`` and for the next call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from ..ops.weighted_sum import weighted_sum
from ..runtime.memory import alloc, is_capturing
from .collectives import exchanged
from .combine import describe_return, reduced_combine, return_bytes
from .expert_parallel import Across, AcrossKind, by_rank
from .message_format import EMPTY, TokenMessage, message_bytes, sent_words, there_bytes
from .rendezvous import known_to_all, rendezvous_of
from .traffic import OutgoingTokens, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory, Regions
    from ..types import ContiguousBatch, Routing

__all__ = ["AllToAllFixed", "AllToAllFixedKind", "FixedHandle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedHandle:
    """here: ``[W * room, K]``, the row of each arrived assignment, negative for those computed elsewhere.

    slots: of each own token's rows ``[T, K]`` among those that come back, or of its parts ``[T, W]``; -2 where there
    was no room. weights: of the own tokens ``[T, K]``, None where they multiplied the input; arrived: of the arrived
    ones ``[W * room, K]``, None where this rank multiplies by none.
    """

    here: Tensor
    slots: Tensor
    weights: Tensor | None
    arrived: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllFixed(Across):
    """Some experts are here. room: tokens that one rank may send to one other.

    missed: ``[1]`` int64, tokens that graphs found no room for since anybody asked.
    """

    room: int
    missed: Tensor

    def check(self) -> None:
        """Raise InputError on every rank where a graph found no room on one; all ranks ask at the same time.

        Waits for the device, and counts from nothing again.
        """
        told = rendezvous_of(self.group).exchange(int(self.missed), f"{self.name} check")
        self._refuse([0] * len(told), told)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, FixedHandle]:
        """Send tokens to the ranks of their experts and sort the assignments of this rank's.

        Raises InputError on every rank where one brings more than ``limit`` tokens or another top-k, sends another more
        than ``room``, or had a graph that did.
        """
        ids, world, top_k = routing.topk_ids, self.map.world_size, routing.topk_ids.shape[1]
        self.map.record(ids)
        places = self.map.choose(ids)
        rank, tokens = by_rank(places, self.map.width, world)
        first, count = tokens.expert_offsets[:-1], tokens.expert_offsets.diff()
        self._agree(ids, count)
        turn = torch.arange(self.room, device=ids.device)
        # Beyond the tokens is one empty message, for what is left of the room.
        messages = self.wire_format.messages(x, places, routing.topk_weights)
        messages = torch.cat([messages, messages.new_full((1, messages.shape[1]), EMPTY)])
        source = torch.cat([tokens.source, tokens.source.new_full((1,), ids.shape[0])])
        at = torch.where(turn < count[:, None], first[:, None] + turn, tokens.source.numel())
        shape = world * self.room, messages.shape[1]
        own = alloc(memory, "sent", shape, torch.uint8, x.device)
        torch.index_select(messages, 0, source[at.reshape(-1)], out=own)
        found = exchanged(
            own,
            group=self.group,
            phase=f"{self.name} dispatch",
            out=alloc(memory, "arrived", shape, torch.uint8, x.device),
        )
        arrived = self.wire_format.read(found, top_k)
        batch, inner = self.inner.dispatch(
            arrived.x, self.wire_format.routing(arrived, self.map.local(arrived.places)), block_t=block_t
        )
        batch = replace(batch, rows=self.rows(ids.shape[0], top_k), scale=arrived.scale, dtype=x.dtype)
        slots = self._slots(tokens.slots, first)
        if self.reduced is None:
            # The token's part of the room on the rank of each assignment has a row for each of its slots.
            found = slots.gather(1, rank.clamp(min=0))
            row = torch.where(found < 0, -2, found * top_k + torch.arange(top_k, device=ids.device))
            slots = torch.where(rank < 0, rank, row)
        carried = self.inner.weight_on_input
        weights = None if carried else routing.topk_weights
        return batch, FixedHandle(here=inner.slots, slots=slots, weights=weights, arrived=inner.weights)

    def combine(
        self,
        rows: Tensor,
        handle: FixedHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]`` of this rank's own tokens, with the bits of a single rank unless it is reduced."""
        if self.reduced is not None:
            found = self._back(self.reduced.parts(rows, handle.here, handle.arrived), memory)
            return self.reduced.sum(found, handle.slots, dtype=dtype, shared=shared, out=out)
        every = handle.here.reshape(-1)
        own = alloc(memory, "own", (every.numel(), rows.shape[1]), rows.dtype, rows.device)
        # Rows of what is computed elsewhere travel too, and nobody reads them.
        torch.index_select(rows, 0, every.clamp(min=0), out=own)
        found = self._back(own, memory)
        return weighted_sum(found, handle.slots, handle.weights, dtype, shared=shared, out=out)

    def _back(self, own: Tensor, memory: Memory | None) -> Tensor:
        out = alloc(memory, "returned", tuple(own.shape), own.dtype, own.device)
        return exchanged(own, group=self.group, phase=f"{self.name} combine", out=out)

    def _slots(self, found: Tensor, first: Tensor) -> Tensor:
        """Return each token's place in the room of each rank ``[T, W]``, -1 where it does not go, -2 without room."""
        turn = found - first
        place = turn + torch.arange(first.numel(), device=first.device) * self.room
        return torch.where(found < 0, found, torch.where(turn < self.room, place, -2))

    def _agree(self, ids: Tensor, count: Tensor) -> None:
        """Let all ranks tell what they bring, and raise on every rank; what a graph has no room for is counted."""
        if is_capturing(ids.device):
            # The host can tell sizes of tensors while a graph is captured, and not what is in them.
            self.met(ids.shape, (0, 0))
            self.missed.add_((count - self.room).clamp(min=0).sum())
            return
        most, missed = torch.stack([count.amax(), self.missed[0]]).tolist()
        table = self.met(ids.shape, (most, missed))
        self._refuse([told[0] for *_, told in table], [told[1] for *_, told in table])

    def _refuse(self, most: list[int], missed: list[int]) -> None:
        late = "; ".join(f"rank {rank}: {found}" for rank, found in enumerate(missed) if found)
        if late:
            self.missed.zero_()
            raise InputError(
                f"{self.name}: tokens found no room when a CUDA graph ran, and their rows are NaN ({late}); one rank "
                f"may send rank_tokens={self.room} tokens to one other. Plan with a larger Limits(rank_tokens=...)"
            )
        if max(most) > self.room:
            said = "; ".join(f"rank {rank}: {found}" for rank, found in enumerate(most))
            text = (
                f"{self.name}: one rank may send rank_tokens={self.room} tokens to one other, and the most that each "
                f"would send are {said}; nothing was sent. Plan with a larger Limits(rank_tokens=...), or call with "
                "fewer tokens"
            )
            raise known_to_all(InputError(text))


class AllToAllFixedKind(AcrossKind):
    """The row of the table."""

    name = "all_to_all_fixed"
    capturable = True

    def wire_format(self, problem: Problem) -> str:
        """Return what travels, and for how many tokens there is room."""
        return (
            f"{sent_words(problem)} once to each rank of their experts with room for {_room(problem):,} from one to "
            f"another, {describe_return(problem)},"
        )

    def capacity(self, problem: Problem) -> int:
        """Return the assignments of the tokens there is room for."""
        return problem.world_size * _room(problem) * problem.spec.routing.top_k

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return those of what travels; the order of rows is in torch's own memory."""
        top_k, rows = problem.spec.routing.top_k, problem.world_size * _room(problem)
        sent = rows * message_bytes(TokenMessage.of(problem).columns(top_k))
        reduced = reduced_combine(problem)
        if reduced is not None:
            return {"sent": sent, "arrived": sent, "returned": rows * message_bytes(reduced.columns())}
        # Experts return float32, or the layer's dtype where that loses nothing.
        back = rows * top_k * problem.spec.expert_hidden_size * torch.float32.itemsize
        return {"sent": sent, "arrived": sent, "own": back, "returned": back}

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return the room for messages and rows, full or empty."""
        copies = _room(problem) * (problem.world_size - 1)
        back = copies * (problem.spec.routing.top_k if problem.combine == "exact" else 1)
        return Traffic(copies * there_bytes(problem), back * return_bytes(problem))

    def build(self, problem: Problem) -> AllToAllFixed:
        """Return the dispatcher, as ``Across.of`` does."""
        with torch.inference_mode(False):
            missed = torch.zeros(1, dtype=torch.int64, device=problem.device.place)
        return AllToAllFixed.of(self.name, problem, room=_room(problem), missed=missed)


def _room(problem: Problem) -> int:
    return problem.limits.rank_tokens or problem.limits.max_tokens
