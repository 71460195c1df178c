"""Partial sums: the caller adds up the results of all ranks (for engines that do the all-reduce themselves).

Every rank receives all tokens and their routing, computes the assignments of its local experts (or of its slices of
them) and drops the others. The sum of all ranks' results, each rounded to the layer's dtype, equals the layer's output
up to that rounding and the order of additions. Rank 0 adds the shared expert, or every rank adds a slice of it
(``sharing.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

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
    """This rank holds some of the experts. slot: ``[E + 2]`` int64, the local slot of each expert, -1 on other ranks.

    The last two entries serve ids that are no expert: an id of -1 adds nothing, any other makes its token NaN.
    """

    inner: Local
    slot: Tensor

    @property
    def expert_map(self) -> None:
        """None: experts do not move."""

    def rows(self, tokens: int, top_k: int) -> int:
        """Return this rank's share of the assignments if all experts are equally loaded."""
        return share(tokens * top_k, self.inner.num_experts, self.slot.numel() - 2)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, LocalHandle]:
        """Sort the assignments of this rank's experts; for arguments see ``Dispatcher``."""
        ids = routing.topk_ids.to(torch.int64)
        experts = self.slot.numel() - 2
        valid = (ids >= 0) & (ids < experts)
        # Indexing by a mask would wait for the device; an index for each id does not.
        index = torch.where(valid, ids, torch.where(ids == -1, experts, experts + 1))
        local_routing = Routing(topk_ids=self.slot[index], topk_weights=routing.topk_weights)
        batch, handle = self.inner.dispatch(x, local_routing, memory, block_t=block_t)
        return replace(batch, rows=self.rows(*ids.shape)), handle

    def send_back(
        self, rows: Tensor, handle: LocalHandle, memory: Memory | None = None, *, overlap: bool = False
    ) -> Tensor:
        """Return ``rows``: nothing travels."""
        return rows

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

    def for_halves(self) -> Self:
        """Return this dispatcher."""
        return self

    def check(self) -> None:
        """Do nothing: the caller does the exchange."""


def share(assignments: int, slots: int, experts: int) -> int:
    """Return how many of ``assignments`` fall on ``slots`` slots if all of ``experts`` are equally loaded."""
    return -(-assignments * slots // experts)


class PartialKind:
    """The dispatcher of partial sums, used on request alone: its result is not the layer's output."""

    name = "partial"
    capturable = True
    collective = False
    symmetric = False
    partial_sums = True
    overlaps = ""
    no_half_batches = "tokens stay on their rank"
    fixed_messages = False

    def refuse(self, problem: Problem, *, requested: bool) -> str | None:
        """Refuse ranks without experts, operations that apply to the whole sum, and plans that did not request it."""
        if not problem.slots:
            return "this rank has no experts; assign it at least one, or do not call the layer on it"
        if problem.combine != "exact":
            return f"combine={problem.combine!r} was requested; the caller adds the partial sums"
        if problem.spec.latent_norm_eps is not None:
            return (
                "the latent projection has a norm, which needs the full sum; run projections and norm outside the layer"
            )
        if not requested:
            return "it returns a partial sum; select it with Overrides(dispatcher='partial')"
        return None

    def wire_format(self, problem: Problem) -> str:
        """Return ``none``."""
        return "none"

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return this rank's share of the assignments."""
        return share(tokens * problem.spec.routing.top_k, problem.slots, problem.spec.num_experts)

    def capacity(self, problem: Problem) -> int:
        """Return the number of assignments of ``max_tokens`` tokens: all may fall on this rank's experts."""
        return LocalKind().capacity(problem)

    def batch_tokens(self, problem: Problem) -> int:
        """Return ``max_tokens``."""
        return problem.limits.max_tokens

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return the regions of ``local``."""
        return LocalKind().regions(problem, lists=lists)

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return nothing."""
        return NOTHING

    def build(self, problem: Problem) -> Partial:
        """Return the dispatcher, with its table on the problem's device."""
        local_ids = list(problem.local_experts)
        experts = problem.spec.num_experts
        slot = torch.full((experts + 2,), -1, dtype=torch.int64)
        slot[local_ids] = torch.arange(len(local_ids))
        slot[experts + 1] = experts + problem.slots  # neither a local slot nor -1
        inner = Local(num_experts=problem.slots, weight_on_input=problem.spec.routing.weight_on_input)
        return Partial(inner=inner, slot=slot.to(problem.device.place))
