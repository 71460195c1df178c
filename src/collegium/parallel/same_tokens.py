"""Every rank is called with the same tokens: each serves its share of them, and all get the outputs of all.

So attention may be replicated and no token is computed twice. A token's output is made by one rank and copied to the
others, so the ranks agree on every bit of it. Inputs that differ are an error in the passes that are compared
(``input_check.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..types import Routing
from .collectives import gathered
from .dispatch_wrapper import DispatchWrapper, DispatchWrapperKind, WrapperHandle, check_same_tokens
from .rendezvous import rendezvous_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory, MemoryMap
    from ..types import ContiguousBatch
    from .base import SymmetricDispatcher

__all__ = ["SameTokens", "SameTokensKind", "SameTokensReaching", "share_of"]


def share_of(tokens: int, rank: int, world_size: int) -> slice:
    """Return which of ``tokens`` tokens a rank serves: each rank as many, the last ones fewer or none."""
    each = -(-tokens // world_size)
    return slice(min(tokens, rank * each), min(tokens, (rank + 1) * each))


@dataclass(frozen=True, kw_only=True, slots=True)
class SameTokens(DispatchWrapper):
    """A share of the tokens goes to ``inner``. meets: ranks compare how many tokens they have at every call."""

    rank: int
    world_size: int
    group: str
    meets: bool

    def rows(self, tokens: int, top_k: int) -> int:
        """Return the rows of a share of ``tokens`` tokens on every rank."""
        return self.inner.rows(-(-tokens // self.world_size), top_k)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, WrapperHandle]:
        """Dispatch this rank's share of ``x [T, H]``; raises InputError on every rank where T is not the same."""
        tokens = x.shape[0]
        if self.meets:
            check_same_tokens("same_tokens", self.group, tokens)
        batch, inner = self.inner.dispatch(*self._share(x, routing), memory, block_t=block_t)
        return batch, WrapperHandle(inner=inner, tokens=tokens)

    def _share(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        own = share_of(x.shape[0], self.rank, self.world_size)
        return x[own], Routing(topk_ids=routing.topk_ids[own], topk_weights=routing.topk_weights[own])

    def combine(
        self,
        rows: Tensor,
        handle: WrapperHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]`` of all tokens, on every rank."""
        own = share_of(handle.tokens, self.rank, self.world_size)
        made = torch.empty(own.stop - own.start, rows.shape[1], dtype=dtype, device=rows.device)
        part = None if shared is None else shared[own]
        self.inner.combine(rows, handle.inner, memory, dtype=dtype, shared=part, out=made)
        most = -(-handle.tokens // self.world_size)
        found = gathered(made, most, 0, group=self.group, phase="same_tokens combine")[: handle.tokens]
        return found if out is None else out.copy_(found)


class SameTokensReaching(SameTokens):
    """The same around ranks that read each other's memory."""

    __slots__ = ()
    inner: SymmetricDispatcher

    @property
    def blocks(self) -> Any:
        """What lends the memory of passes."""
        return self.inner.blocks

    def register_layer(self, places: MemoryMap) -> int:
        """Make room for a layer."""
        return self.inner.register_layer(places)

    def sync_pass(self, memory: Memory, layer: int, tokens: int, top_k: int) -> Hashable:
        """Agree on a pass of which this rank serves its share; raises InputError on every rank where T differs."""
        return tokens, self.inner.sync_pass(memory, layer, tokens, top_k, shares=self.world_size)

    def sync_call(self, layer: int, tokens: int, top_k: int) -> None:
        """Agree as ``meet`` does, without a pass that follows."""
        self.inner.sync_call(layer, tokens, top_k, shares=self.world_size)

    def expected_rows(self, posted: tuple[Any, int]) -> int:
        """Return how many rows are likely to be here."""
        return self.inner.expected_rows(posted[0])

    def send(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, codes: tuple[str, int] | None = None
    ) -> tuple[Any, int]:
        """Let peers read this rank's share of ``x [T, H]``."""
        return self.inner.send(*self._share(x, routing), memory, codes=codes), x.shape[0]

    def receive(
        self,
        posted: tuple[Any, int],
        memory: Memory | None = None,
        *,
        block_t: tuple[int, ...] = (),
        storing: tuple[int, torch.dtype] | None = None,
    ) -> tuple[ContiguousBatch, WrapperHandle]:
        """Do the rest of ``dispatch``."""
        batch, inner = self.inner.receive(posted[0], memory, block_t=block_t, storing=storing)
        return batch, WrapperHandle(inner=inner, tokens=posted[1])


class SameTokensKind(DispatchWrapperKind):
    """Around any row of the table that sends tokens between ranks."""

    does = "the same tokens on every rank"
    adds = "and outputs to every rank"

    def __init__(self, inner: Any, placed: Any) -> None:
        """Cut batches into passes: all ranks have as many tokens, and so as many passes."""
        super().__init__(inner, placed)
        self.collective = False

    def inner_problem(self, problem: Problem) -> Problem:
        """Return the question with a share of the tokens."""
        most = -(-problem.limits.max_tokens // self.placed.world_size)
        given = problem.limits.rank_tokens
        limits = replace(problem.limits, max_tokens=most, rank_tokens=None if given is None else min(given, most))
        placed = None if problem.placement is None else replace(problem.placement, same_tokens=False)
        return replace(problem, limits=limits, placement=placed)

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return the rows of a share of the tokens."""
        return self.inner.rows(self.inner_problem(problem), -(-tokens // self.placed.world_size))

    def build(self, problem: Problem) -> SameTokens:
        """Return the dispatcher; all ranks build it at the same time."""
        placed = self.placed
        rendezvous_of(placed.group).agree(problem.limits, "same_tokens: building a layer")
        inner = self.inner.build(self.inner_problem(problem))
        return (SameTokensReaching if self.inner.symmetric else SameTokens)(
            inner=inner,
            rank=placed.rank,
            world_size=placed.world_size,
            group=placed.group,
            # Those that a CUDA graph can hold never meet on the host.
            meets=not self.inner.capturable,
        )
