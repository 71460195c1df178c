"""Expert parallelism by all-gather: every rank receives all tokens, computes its experts' rows, and returns each row.

In each pass the ranks exchange their numbers of tokens, gather tokens and physical ids, and reduce-scatter the rows:
exactly one rank contributes a nonzero row for each assignment, so the sum is that row, bit for bit. The weighted sum is
that of a single rank, in slot order. With a reduced combine each rank returns one row for each token instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..ops.weighted_sum import weighted_sum
from .collectives import all_gather_rows, start_all_to_all, start_reduce_scatter
from .combine import describe_return, return_bytes
from .expert_parallel import ExpertParallel, ExpertParallelKind
from .message_format import EMPTY, describe_tokens, dispatch_bytes
from .traffic import OutgoingTokens, Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory
    from ..types import ContiguousBatch, Routing
    from .collectives import PendingRows

__all__ = ["AllGather", "AllGatherHandle", "AllGatherKind"]

_COMBINE = "all_gather combine"


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherHandle:
    """What ``combine`` needs, with W ranks of up to M tokens.

    slots: ``[W * M, K]``, the local row of every rank's assignments, negative for assignments of other ranks. ids,
    weights: of this rank's tokens ``[T, K]``; weights None where they multiplied the input. received_weights: weights
    of all tokens ``[W * M, K]``, None where this rank does not multiply by them.
    """

    slots: Tensor
    ids: Tensor
    weights: Tensor | None
    received_weights: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGather(ExpertParallel):
    """Gathers all tokens on every rank."""

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, AllGatherHandle]:
        """Gather every rank's tokens and sort the assignments of this rank's experts.

        Raises InputError on every rank where one has more than ``limit`` tokens or another top-k.
        """
        ids = routing.topk_ids
        top_k = ids.shape[1]
        self.expert_map.record(ids)
        max_tokens = max(counts.tokens for counts in self.exchange_counts(ids.shape))
        messages = self.message.pack(x, self.expert_map.choose(ids), routing.topk_weights)
        gathered = all_gather_rows(messages, max_tokens, EMPTY, group=self.group, phase="all_gather dispatch")
        received = self.message.unpack(gathered, top_k)
        local_routing = self.message.routing(received, self.expert_map.local(received.physical_ids))
        batch, inner = self.inner.dispatch(received.x, local_routing, block_t=block_t)
        batch = replace(batch, rows=self.rows(max_tokens, top_k), scale=received.scale, dtype=x.dtype)
        return batch, AllGatherHandle(
            slots=inner.slots,
            ids=ids.contiguous(),
            weights=None if self.inner.weight_on_input else routing.topk_weights,
            received_weights=inner.weights,
        )

    def send_back(
        self, rows: Tensor, handle: AllGatherHandle, memory: Memory | None = None, *, overlap: bool = False
    ) -> PendingRows:
        """Start to return rows, or their sums, to the ranks of their tokens."""
        if self.reduced is not None:
            sums = self.reduced.pack(rows, handle.slots, handle.received_weights)
            return start_all_to_all(sums, group=self.group, phase=_COMBINE, overlap=overlap)
        slots = handle.slots.reshape(-1)
        contribution = rows.new_zeros(slots.numel(), rows.shape[1])
        if rows.shape[0]:
            contribution = rows.index_select(0, slots.clamp(min=0)).masked_fill_((slots < 0)[:, None], 0)
        return start_reduce_scatter(contribution, group=self.group, phase=_COMBINE, overlap=overlap)

    def combine(
        self,
        returning: PendingRows,
        handle: AllGatherHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]`` of this rank's tokens; except in a reduced combine with the bits of a single rank."""
        ids = handle.ids
        returned = returning.wait()
        if self.reduced is not None:
            # Rank r returns the sums of this rank's tokens 0 to M - 1 in rows r * M onwards.
            index = torch.arange(returned.shape[0], device=ids.device)
            slots = index.view(self.expert_map.world_size, -1).t()[: ids.shape[0]]
            return self.reduced.sum(returned, slots, dtype=dtype, shared=shared, out=out)
        experts = self.expert_map.num_experts
        return weighted_sum(
            returned[: ids.numel()], ids, handle.weights, dtype, shared=shared, out=out, experts=experts
        )


class AllGatherKind(ExpertParallelKind):
    """The kind of ``AllGather``."""

    name = "all_gather"

    def wire_format(self, problem: Problem) -> str:
        """Describe what travels."""
        return f"{describe_tokens(problem)} to every rank, {describe_return(problem)}"

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return the bytes of messages and rows: as many as the rank with the most tokens has, to every other rank."""
        copies = away.max_tokens * (problem.world_size - 1)
        returned = copies * (problem.spec.routing.top_k if problem.combine == "exact" else 1)
        return Traffic(copies * dispatch_bytes(problem), returned * return_bytes(problem))

    def build(self, problem: Problem) -> AllGather:
        """Return the dispatcher; see ``ExpertParallel.of``."""
        return AllGather.of(self.name, problem)
