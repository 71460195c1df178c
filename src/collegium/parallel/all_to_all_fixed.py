"""``all_to_all`` with a fixed number of message slots for each pair of ranks, so that a CUDA graph can capture it.

A message's slot follows from its destination and its position among the messages to that rank; unused slots travel
empty. Tokens beyond the slots are never dropped silently. Outside a graph all ranks learn of them before anything is
sent, and raise; in a graph their rows are NaN, and they are counted for ``check`` and for the next pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch

from ..errors import InputError
from ..ops.weighted_sum import weighted_sum
from ..runtime.memory import alloc, is_capturing
from .collectives import all_to_all_rows, start_all_to_all
from .combine import describe_return, reduced_combine, return_bytes
from .expert_parallel import ExpertParallel, ExpertParallelKind, permute_by_rank
from .message_format import EMPTY, TokenMessage, describe_tokens, dispatch_bytes, message_bytes
from .rendezvous import known_to_all, rendezvous_of
from .traffic import OutgoingTokens, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from ..ops.permute import Permutation
    from ..problem import Problem
    from ..runtime.memory import Memory, Regions
    from ..types import ContiguousBatch, Routing
    from .collectives import PendingRows

__all__ = ["AllToAllFixed", "AllToAllFixedHandle", "AllToAllFixedKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllFixedHandle:
    """What ``combine`` needs, with C message slots for each pair of ranks.

    received_slots: ``[W * C, K]``, the local row of each received assignment, negative for assignments of other ranks.
    slots: each local token's rows ``[T, K]`` among those that return, or its partial sums ``[T, W]``; -2 beyond the
    capacity. weights: of the local tokens ``[T, K]``, None where they multiplied the input. received_weights:
    ``[W * C, K]``, None where this rank does not multiply by them.
    """

    received_slots: Tensor
    slots: Tensor
    weights: Tensor | None
    received_weights: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllFixed(ExpertParallel):
    """Sends each token to the ranks of its experts, in a fixed number of message slots.

    rank_tokens: C, the message slots from one rank to another. overflow: ``[1]`` int64, tokens beyond the capacity in
    graph replays since the last check. halved: it exchanges half batches, and C is half of the limit.
    """

    rank_tokens: int
    overflow: Tensor
    halved: bool = False

    def for_halves(self) -> Self:
        """Return the dispatcher of a half batch: with half of the message slots, so both halves send as many bytes."""
        return replace(self, rank_tokens=-(-self.rank_tokens // 2), halved=True)

    def check(self) -> None:
        """Raise InputError on every rank where a graph exceeded the capacity of one; all ranks call it together.

        Waits for the device, and resets the count.
        """
        overflows = rendezvous_of(self.group).exchange(int(self.overflow), f"{self.name} check")
        self._raise_overflow(overflows)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, AllToAllFixedHandle]:
        """Send tokens to the ranks of their experts and sort the received assignments of this rank's experts.

        Raises InputError on every rank where one has more than ``limit`` tokens or another top-k, sends another more
        than ``rank_tokens``, or had a graph that did.
        """
        ids = routing.topk_ids
        top_k = ids.shape[1]
        self.expert_map.record(ids)
        physical_ids = self.expert_map.choose(ids)
        rank, tokens = permute_by_rank(physical_ids, self.expert_map.width, self.expert_map.world_size)
        self._agree(ids, tokens.expert_offsets.diff())
        messages = self._padded_messages(self.message.pack(x, physical_ids, routing.topk_weights), tokens, memory)
        received = self.message.unpack(
            all_to_all_rows(
                messages,
                group=self.group,
                phase=f"{self.name} dispatch",
                out=alloc(memory, "received", tuple(messages.shape), torch.uint8, x.device),
            ),
            top_k,
        )
        local_routing = self.message.routing(received, self.expert_map.local(received.physical_ids))
        batch, inner = self.inner.dispatch(received.x, local_routing, block_t=block_t)
        batch = replace(batch, rows=self.rows(ids.shape[0], top_k), scale=received.scale, dtype=x.dtype)
        slots = self._message_slots(tokens)
        if self.reduced is None:
            # Each message slot has top_k rows.
            slot = slots.gather(1, rank.clamp(min=0))
            row = torch.where(slot < 0, -2, slot * top_k + torch.arange(top_k, device=ids.device))
            slots = torch.where(rank < 0, rank, row)
        return batch, AllToAllFixedHandle(
            received_slots=inner.slots,
            slots=slots,
            weights=None if self.inner.weight_on_input else routing.topk_weights,
            received_weights=inner.weights,
        )

    def _padded_messages(self, messages: Tensor, tokens: Permutation, memory: Memory | None) -> Tensor:
        """Return ``[W * C, B]``: the messages to each rank in its message slots, empty ones in the rest."""
        device = messages.device
        first = tokens.expert_offsets[:-1]
        count = tokens.expert_offsets.diff()
        position = torch.arange(self.rank_tokens, device=device)
        # One empty message after the last token fills unused message slots.
        with_empty = torch.cat([messages, messages.new_full((1, messages.shape[1]), EMPTY)])
        source = torch.cat([tokens.source, tokens.source.new_full((1,), messages.shape[0])])
        index = torch.where(position < count[:, None], first[:, None] + position, tokens.source.numel())
        shape = first.numel() * self.rank_tokens, messages.shape[1]
        padded = alloc(memory, "sent", shape, torch.uint8, device)
        return torch.index_select(with_empty, 0, source[index.reshape(-1)], out=padded)

    def send_back(
        self, rows: Tensor, handle: AllToAllFixedHandle, memory: Memory | None = None, *, overlap: bool = False
    ) -> PendingRows:
        """Start to return rows, or their sums, to the ranks of their tokens."""
        if self.reduced is not None:
            outgoing = self.reduced.pack(rows, handle.received_slots, handle.received_weights)
        else:
            slots = handle.received_slots.reshape(-1)
            outgoing = alloc(memory, "outgoing", (slots.numel(), rows.shape[1]), rows.dtype, rows.device)
            # Assignments of other ranks take row 0 along, which the receiver does not read.
            torch.index_select(rows, 0, slots.clamp(min=0), out=outgoing)
        returned = alloc(memory, "returned", tuple(outgoing.shape), outgoing.dtype, outgoing.device)
        phase = f"{self.name} combine"
        return start_all_to_all(outgoing, group=self.group, phase=phase, out=returned, overlap=overlap)

    def combine(
        self,
        returning: PendingRows,
        handle: AllToAllFixedHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]`` of this rank's tokens; except in a reduced combine with the bits of a single rank."""
        returned = returning.wait()
        if self.reduced is not None:
            return self.reduced.sum(returned, handle.slots, dtype=dtype, shared=shared, out=out)
        return weighted_sum(returned, handle.slots, handle.weights, dtype, shared=shared, out=out)

    def _message_slots(self, tokens: Permutation) -> Tensor:
        """Return each token's message slot on each rank ``[T, W]``; -1 where it is not sent, -2 beyond capacity."""
        first = tokens.expert_offsets[:-1]
        position = tokens.slots - first
        slot = position + torch.arange(first.numel(), device=first.device) * self.rank_tokens
        return torch.where(tokens.slots < 0, tokens.slots, torch.where(position < self.rank_tokens, slot, -2))

    def _agree(self, ids: Tensor, counts: Tensor) -> None:
        """Exchange counts and raise on every rank beyond the capacity; while a graph captures, count on the device."""
        if is_capturing(ids.device):
            # During capture the host can read shapes, but not values.
            self.exchange_counts(ids.shape, (0, 0))
            self.overflow.add_((counts - self.rank_tokens).clamp(min=0).sum())
            return
        max_count, overflow = torch.stack([counts.amax(), self.overflow[0]]).tolist()
        table = self.exchange_counts(ids.shape, (max_count, overflow))
        self._raise_overflow([entry.extra[1] for entry in table])
        self._check_capacity([entry.extra[0] for entry in table])

    @property
    def _limit(self) -> str:
        """The number of message slots, for errors."""
        half = " (half of the limit) of a half batch's" if self.halved else ""
        return f"rank_tokens={self.rank_tokens}{half}"

    def _raise_overflow(self, overflows: list[int]) -> None:
        """Raise InputError if a graph replay on any rank exceeded the capacity."""
        lost = "; ".join(f"rank {rank}: {count}" for rank, count in enumerate(overflows) if count)
        if lost:
            self.overflow.zero_()
            raise InputError(
                f"{self.name}: tokens found no room when a CUDA graph ran, and their rows are NaN ({lost}); one rank "
                f"may send {self._limit} tokens to one other. Plan with a larger Limits(rank_tokens=...)"
            )

    def _check_capacity(self, max_counts: list[int]) -> None:
        """Raise InputError if any rank would send another more than ``rank_tokens`` tokens."""
        if max(max_counts) > self.rank_tokens:
            requested = "; ".join(f"rank {rank}: {count}" for rank, count in enumerate(max_counts))
            text = (
                f"{self.name}: one rank may send {self._limit} tokens to one other, and the most that each would send "
                f"are {requested}; nothing was sent. Plan with a larger Limits(rank_tokens=...), or call with fewer "
                "tokens"
            )
            raise known_to_all(InputError(text))


class AllToAllFixedKind(ExpertParallelKind):
    """The kind of ``AllToAllFixed``."""

    name = "all_to_all_fixed"
    capturable = True
    fixed_messages = True

    def wire_format(self, problem: Problem) -> str:
        """Describe what travels, and the number of message slots."""
        return (
            f"{describe_tokens(problem)} once to each rank with one of their experts (up to {_rank_tokens(problem):,} "
            f"from one rank to another), {describe_return(problem)}"
        )

    def capacity(self, problem: Problem) -> int:
        """Return the number of assignments of all message slots."""
        return problem.world_size * _rank_tokens(problem) * problem.spec.routing.top_k

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return the regions of what travels; torch allocates the permutation."""
        slots = problem.world_size * _rank_tokens(problem)
        top_k = problem.spec.routing.top_k
        sent = slots * message_bytes(TokenMessage.of(problem).columns(top_k))
        reduced = reduced_combine(problem)
        if reduced is not None:
            return {"sent": sent, "received": sent, "returned": slots * message_bytes(reduced.columns())}
        # Experts return float32, or the layer's dtype where that loses nothing.
        rows = slots * top_k * problem.spec.expert_hidden_size * torch.float32.itemsize
        return {"sent": sent, "received": sent, "outgoing": rows, "returned": rows}

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return the bytes of all message slots and their rows, used or not."""
        copies = _rank_tokens(problem) * (problem.world_size - 1)
        returned = copies * (problem.spec.routing.top_k if problem.combine == "exact" else 1)
        return Traffic(copies * dispatch_bytes(problem), returned * return_bytes(problem))

    def build(self, problem: Problem) -> AllToAllFixed:
        """Return the dispatcher; see ``ExpertParallel.of``."""
        with torch.inference_mode(False):
            overflow = torch.zeros(1, dtype=torch.int64, device=problem.device.place)
        return AllToAllFixed.of(self.name, problem, rank_tokens=_rank_tokens(problem), overflow=overflow)


def _rank_tokens(problem: Problem) -> int:
    return problem.limits.rank_tokens or problem.limits.max_tokens
