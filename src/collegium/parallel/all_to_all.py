"""Expert parallelism by all-to-all: a token goes once to each rank that has one of its experts, and its rows return.

In each pass every rank computes how many tokens and rows it sends to each rank, and the ranks exchange these counts
before anything else. This is the one wait of the host, and the reason why a CUDA graph cannot capture the pass. Tokens
arrive in the order of ranks, and within a rank in its order: the order of a single rank that has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..ops.permute import permute
from ..ops.weighted_sum import weighted_sum
from .collectives import all_to_all_rows, start_all_to_all
from .combine import describe_return, return_bytes
from .expert_parallel import ExpertParallel, ExpertParallelKind, permute_by_rank
from .message_format import describe_tokens, dispatch_bytes
from .traffic import OutgoingTokens, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory
    from ..types import ContiguousBatch, Routing
    from .collectives import PendingRows

__all__ = ["AllToAll", "AllToAllHandle", "AllToAllKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllHandle:
    """What ``combine`` needs for T local tokens and N received ones.

    received_slots: ``[N, K]``, the local row of each received assignment, negative for assignments of other ranks.
    send_counts, recv_counts: rows that return to and from each rank. slots: each local token's rows ``[T, K]`` among
    those that return, or its partial sums ``[T, W]``. weights: of the local tokens ``[T, K]``, None where they
    multiplied the input. received_weights: ``[N, K]``, None where this rank does not multiply by them.
    """

    received_slots: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    slots: Tensor
    weights: Tensor | None
    received_weights: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAll(ExpertParallel):
    """Sends each token to the ranks of its experts."""

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, AllToAllHandle]:
        """Send tokens to the ranks of their experts and sort the received assignments of this rank's experts.

        Raises InputError on every rank where one has more than ``limit`` tokens or another top-k.
        """
        ids = routing.topk_ids
        top_k = ids.shape[1]
        world = self.expert_map.world_size
        self.expert_map.record(ids)
        physical_ids = self.expert_map.choose(ids)
        rank, tokens = permute_by_rank(physical_ids, self.expert_map.width, world)
        rows = permute(rank, world)
        counts = torch.stack([tokens.expert_offsets.diff(), rows.expert_offsets.diff()]).tolist()
        token_send_counts, row_recv_counts = counts
        table = self.exchange_counts(ids.shape, counts)
        token_recv_counts, row_send_counts = (
            [entry.extra[which][self.expert_map.rank] for entry in table] for which in (0, 1)
        )
        messages = self.message.pack(x, physical_ids, routing.topk_weights)
        received = self.message.unpack(
            all_to_all_rows(
                messages.index_select(0, tokens.source[: sum(token_send_counts)]),
                token_send_counts,
                token_recv_counts,
                group=self.group,
                phase="all_to_all dispatch",
            ),
            top_k,
        )
        local_routing = self.message.routing(received, self.expert_map.local(received.physical_ids))
        batch, inner = self.inner.dispatch(received.x, local_routing, block_t=block_t)
        # Assignments of other ranks were sorted to the end.
        local_rows = sum(row_send_counts)
        input_weights = batch.input_weights
        batch = replace(
            batch,
            source=batch.source[:local_rows],
            input_weights=None if input_weights is None else input_weights[:local_rows],
            rows=self.rows(max(entry.tokens for entry in table), top_k),
            scale=received.scale,
            dtype=x.dtype,
        )
        reduced = self.reduced is not None
        return batch, AllToAllHandle(
            received_slots=inner.slots,
            send_counts=token_recv_counts if reduced else row_send_counts,
            recv_counts=token_send_counts if reduced else row_recv_counts,
            slots=tokens.slots if reduced else rows.slots,
            weights=None if self.inner.weight_on_input else routing.topk_weights,
            received_weights=inner.weights,
        )

    def send_back(
        self, rows: Tensor, handle: AllToAllHandle, memory: Memory | None = None, *, overlap: bool = False
    ) -> PendingRows:
        """Start to return rows, or their sums, to the ranks of their tokens."""
        if self.reduced is not None:
            outgoing = self.reduced.pack(rows, handle.received_slots, handle.received_weights)
        else:
            slots = handle.received_slots.reshape(-1)
            # Received assignments are in the order of their tokens, which is the order that their rank expects.
            order = torch.nonzero_static(slots >= 0, size=sum(handle.send_counts)).squeeze(1)
            outgoing = rows.index_select(0, slots.index_select(0, order))
        return start_all_to_all(
            outgoing,
            handle.send_counts,
            handle.recv_counts,
            group=self.group,
            phase="all_to_all combine",
            overlap=overlap,
        )

    def combine(
        self,
        returning: PendingRows,
        handle: AllToAllHandle,
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


class AllToAllKind(ExpertParallelKind):
    """The kind of ``AllToAll``."""

    name = "all_to_all"

    def wire_format(self, problem: Problem) -> str:
        """Describe what travels."""
        return f"{describe_tokens(problem)} once to each rank with one of their experts, {describe_return(problem)}"

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return the bytes of a message for each copy, and of a row for each assignment or copy."""
        returned = away.rows if problem.combine == "exact" else away.copies
        return Traffic(away.copies * dispatch_bytes(problem), returned * return_bytes(problem))

    def build(self, problem: Problem) -> AllToAll:
        """Return the dispatcher; see ``ExpertParallel.of``."""
        return AllToAll.of(self.name, problem)
