"""All ranks are called with the same tokens: each serves a share of them, and all receive the outputs of all tokens.

Attention may be replicated, and no token is computed twice. One rank computes the output of a token and sends it to the
others, so all ranks have the same bits. Inputs that differ between ranks are an error in passes that are compared
(``input_check.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..types import Routing
from .collectives import all_gather_rows
from .dispatch_wrapper import DispatchWrapper, DispatchWrapperKind, WrapperHandle, check_same_tokens

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from ..placement import Placement
    from ..problem import Problem
    from ..runtime.memory import Memory, MemoryMap
    from ..types import ContiguousBatch
    from .base import DispatcherKind, SymmetricDispatcher

__all__ = ["SameTokens", "SameTokensKind", "SymmetricSameTokens", "share_of"]


def share_of(tokens: int, rank: int, world_size: int) -> slice:
    """Return which of ``tokens`` tokens ``rank`` serves: equal shares, the last ones smaller or empty."""
    size = -(-tokens // world_size)
    return slice(min(tokens, rank * size), min(tokens, (rank + 1) * size))


@dataclass(frozen=True, kw_only=True, slots=True)
class SameTokens(DispatchWrapper):
    """Delegates this rank's share of the tokens to ``inner``.

    hidden: width of the experts' rows. compares_counts: ranks compare their number of tokens in every pass.
    """

    rank: int
    world_size: int
    group: str
    hidden: int
    compares_counts: bool

    def rows(self, tokens: int, top_k: int) -> int:
        """Return the expected number of local rows for a share of ``tokens`` tokens."""
        return self.inner.rows(-(-tokens // self.world_size), top_k)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, WrapperHandle]:
        """Dispatch this rank's share of ``x [T, H]``; raises InputError on every rank where T differs."""
        tokens = x.shape[0]
        if self.compares_counts:
            check_same_tokens("same_tokens", self.group, tokens)
        batch, inner = self.inner.dispatch(*self._share(x, routing), memory, block_t=block_t)
        return batch, WrapperHandle(inner=inner, tokens=tokens, device=x.device)

    def _share(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        share = share_of(x.shape[0], self.rank, self.world_size)
        return x[share], Routing(topk_ids=routing.topk_ids[share], topk_weights=routing.topk_weights[share])

    def send_back(
        self, rows: Tensor, handle: WrapperHandle, memory: Memory | None = None, *, overlap: bool = False
    ) -> Any:
        """Start to return the rows of this rank's share of the tokens."""
        return self.inner.send_back(rows, handle.inner, memory, overlap=overlap)

    def combine(
        self,
        returning: Any,
        handle: WrapperHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]`` of all tokens, on every rank."""
        share = share_of(handle.tokens, self.rank, self.world_size)
        sums = torch.empty(share.stop - share.start, self.hidden, dtype=dtype, device=handle.device)
        shared_share = None if shared is None else shared[share]
        self.inner.combine(returning, handle.inner, memory, dtype=dtype, shared=shared_share, out=sums)
        share_size = -(-handle.tokens // self.world_size)
        gathered = all_gather_rows(sums, share_size, 0, group=self.group, phase="same_tokens combine")
        result = gathered[: handle.tokens]
        return result if out is None else out.copy_(result)


class SymmetricSameTokens(SameTokens):
    """``SameTokens`` with an ``inner`` whose ranks read each other's memory."""

    __slots__ = ()
    inner: SymmetricDispatcher

    @property
    def blocks(self) -> Any:
        """The pool that lends the memory of passes."""
        return self.inner.blocks

    def register_layer(self, layout: MemoryMap) -> int:
        """Reserve the regions of a layer."""
        return self.inner.register_layer(layout)

    def sync_pass(self, memory: Memory, layer: int, tokens: int, top_k: int) -> Hashable:
        """Agree on a pass of which this rank serves its share; raises InputError on every rank where T differs."""
        return tokens, self.inner.sync_pass(memory, layer, tokens, top_k, shares=self.world_size)

    def sync_call(self, layer: int, tokens: int, top_k: int) -> None:
        """Agree as in ``sync_pass``, without a pass that follows."""
        self.inner.sync_call(layer, tokens, top_k, shares=self.world_size)

    def expected_rows(self, posted: tuple[Any, int]) -> int:
        """Return the expected number of local rows."""
        return self.inner.expected_rows(posted[0])

    def send(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, codes: tuple[str, int] | None = None
    ) -> tuple[Any, int]:
        """Make this rank's share of ``x [T, H]`` readable to the peers."""
        return self.inner.send(*self._share(x, routing), memory, codes=codes), x.shape[0]

    def receive(
        self,
        posted: tuple[Any, int],
        memory: Memory | None = None,
        *,
        block_t: tuple[int, ...] = (),
        storing: tuple[int, torch.dtype] | None = None,
    ) -> tuple[ContiguousBatch, WrapperHandle]:
        """Complete ``dispatch``."""
        inner_posted, tokens = posted
        batch, inner = self.inner.receive(inner_posted, memory, block_t=block_t, storing=storing)
        return batch, WrapperHandle(inner=inner, tokens=tokens, device=batch.x.device)


class SameTokensKind(DispatchWrapperKind):
    """Wraps dispatchers that send tokens between ranks, or ``Slices`` of one."""

    description = "the same tokens on every rank"
    adds = "outputs to every rank"

    def __init__(self, inner: DispatcherKind, placement: Placement) -> None:
        """Allow batches to be split into passes: all ranks have the same number of tokens, hence of passes."""
        super().__init__(inner, placement)
        self.collective = False

    def inner_problem(self, problem: Problem) -> Problem:
        """Return the problem of one share of the tokens."""
        share = -(-problem.limits.max_tokens // self.placement.world_size)
        rank_tokens = problem.limits.rank_tokens
        if rank_tokens is not None:
            rank_tokens = min(rank_tokens, share)
        limits = replace(problem.limits, max_tokens=share, rank_tokens=rank_tokens)
        placement = None if problem.placement is None else replace(problem.placement, same_tokens=False)
        return replace(problem, limits=limits, placement=placement)

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return the expected number of local rows for a share of the tokens."""
        return self.inner.rows(self.inner_problem(problem), -(-tokens // self.placement.world_size))

    def build(self, problem: Problem) -> SameTokens:
        """Return the dispatcher; all ranks call it together."""
        placement = self.placement
        wrapper = SymmetricSameTokens if self.inner.symmetric else SameTokens
        return wrapper(
            inner=self.inner.build(self.inner_problem(problem)),
            rank=placement.rank,
            world_size=placement.world_size,
            group=placement.group,
            hidden=problem.spec.expert_hidden_size,
            # Dispatchers that a CUDA graph can capture exchange nothing on the host.
            compares_counts=not self.inner.capturable,
        )
