"""This rank's part of the sum, for a caller that adds the ranks' results itself (an engine with its own all-reduce).

Every rank is given all tokens and all routings. It computes the assignments of its own experts, with its slice of them,
and drops the others. The sum of all ranks' results, each rounded to the layer's dtype, is the layer's output up to that
rounding and the order of additions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..types import Routing
from .local import Local, LocalHandle, LocalKind
from .traffic import NOTHING

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory, Regions
    from ..types import ContiguousBatch
    from .traffic import OutgoingTokens, Traffic

__all__ = ["Partial", "PartialKind", "share"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """Some experts are here. slot: ``[E + 2]`` int64, the local slot of each expert, -1 for one that is elsewhere.

    The last two entries are those of ids that are no expert: -1 adds nothing, any other makes its token NaN.
    """

    inner: Local
    slot: Tensor

    def rows(self, tokens: int, top_k: int) -> int:
        """Return this rank's share of the assignments, where they fall on experts alike."""
        return share(tokens * top_k, self.inner.num_experts, self.slot.numel() - 2)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, LocalHandle]:
        """Sort the assignments of this rank's experts; arguments as ``Dispatcher`` says."""
        ids, experts = routing.topk_ids.to(torch.int64), self.slot.numel() - 2
        known = (ids >= 0) & (ids < experts)
        # An index per id instead of a mask: reads nothing on the host.
        place = torch.where(known, ids, torch.where(ids == -1, experts, experts + 1))
        own = Routing(topk_ids=self.slot[place], topk_weights=routing.topk_weights)
        batch, handle = self.inner.dispatch(x, own, memory, block_t=block_t)
        return replace(batch, rows=self.rows(*ids.shape)), handle

    def combine(
        self,
        rows: Tensor,
        handle: LocalHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's part of ``[T, H]``."""
        return self.inner.combine(rows, handle, memory, dtype=dtype, shared=shared, out=out)

    def check(self) -> None:
        """Do nothing: the caller exchanges."""


def share(assignments: int, slots: int, experts: int) -> int:
    """Return how many of ``assignments`` fall on ``slots`` slots where all of ``experts`` are asked alike."""
    return -(-assignments * slots // experts)


class PartialKind:
    """The row of the table: never taken unless asked for by name, since its result is no layer's output by itself."""

    name = "partial"
    capturable = True
    collective = False
    symmetric = False

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Refuse a shared expert, which every rank would add, what has no part to return, and who did not ask."""
        if not problem.slots:
            return "found no expert on this rank, whose part is nothing; give it one, or do not call the layer there"
        if problem.combine != "exact":
            return f"asked for the combine {problem.combine}; its parts are added by the caller"
        if problem.spec.shared is not None:
            return "asked for a layer with a shared expert, which each rank would add; run the shared expert apart"
        if problem.spec.latent_norm_eps is not None:
            return "asked for a latent layer with a norm, which is of the whole sum; run projections and norm apart"
        if not asked:
            return "returns this rank's part of the sum only; ask for it with Overrides(dispatcher='partial')"
        return None

    def wire_format(self, problem: Problem) -> str:
        """Return none."""
        return "none"

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return this rank's share of the assignments."""
        return share(tokens * problem.spec.routing.top_k, problem.slots, problem.spec.num_experts)

    def capacity(self, problem: Problem) -> int:
        """Return the assignments of ``max_tokens`` tokens: all of them may fall on this rank's experts."""
        return LocalKind().capacity(problem)

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return those of ``local``."""
        return LocalKind().regions(problem, lists=lists)

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return nothing."""
        return NOTHING

    def build(self, problem: Problem) -> Partial:
        """Return the dispatcher, with its table on the problem's device."""
        held, experts = problem.local_experts, problem.spec.num_experts
        slot = torch.full((experts + 2,), -1, dtype=torch.int64)
        slot[list(held)] = torch.arange(len(held))
        slot[experts + 1] = experts + problem.slots  # no slot of this rank, and not -1
        inner = Local(num_experts=problem.slots, weight_on_input=problem.spec.routing.weight_on_input)
        return Partial(inner=inner, slot=slot.to(problem.device.place))
