"""All experts are here: sort the assignments by expert, and weight and sum the rows back in slot order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..ops.permute import permute, permute_regions
from ..ops.weighted_sum import weighted_sum, weighted_sum_regions
from ..types import ContiguousBatch, RemoteOutput
from .traffic import NOTHING

if TYPE_CHECKING:
    from torch import Tensor

    from ..ops.permute import Owners
    from ..problem import Problem
    from ..runtime.memory import Memory, Regions
    from ..types import Routing
    from .traffic import OutgoingTokens, Traffic

__all__ = ["Local", "LocalHandle", "LocalKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalHandle:
    """What ``combine`` needs: the row of each assignment ``[T, K]`` and the weights it is multiplied by, or None."""

    slots: Tensor
    weights: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """All experts are on this rank. weight_on_input: the router weight multiplies the experts' input (Llama-4)."""

    num_experts: int
    weight_on_input: bool = False

    def rows(self, tokens: int, top_k: int) -> int:
        """Return the assignments of ``tokens`` tokens: each is a row here."""
        return tokens * top_k

    def dispatch(
        self,
        x: Tensor,
        routing: Routing,
        memory: Memory | None = None,
        *,
        block_t: tuple[int, ...] = (),
        owners: Owners | None = None,
    ) -> tuple[ContiguousBatch, LocalHandle]:
        """Sort the assignments of ``x [T, H]`` by expert; arguments as ``Dispatcher`` says.

        owners: of the assignments; the rows are to be stored at them.
        """
        carried = routing.topk_weights if self.weight_on_input else None
        order = permute(
            routing.topk_ids, self.num_experts, input_weights=carried, block_t=block_t, owners=owners, memory=memory
        )
        batch = ContiguousBatch(
            x=x,
            source=order.source,
            expert_offsets=order.expert_offsets,
            input_weights=order.weights_by_row,
            tiles=order.tiles,
            # Outside a pass with memory of its own, what the order was made from may already be somebody else's.
            x_ready=memory is not None,
            remote=None
            if owners is None or order.row_offsets is None
            else RemoteOutput(rows=owners.rows, offsets=order.row_offsets),
        )
        return batch, LocalHandle(slots=order.slots, weights=None if self.weight_on_input else routing.topk_weights)

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
        """Return ``[T, H]``: the weighted rows of each token summed in slot order, plus ``shared``, rounded once."""
        return weighted_sum(rows, handle.slots, handle.weights, dtype, shared=shared, out=out, memory=memory)

    def check(self) -> None:
        """Do nothing: there is no other rank."""


class LocalKind:
    """The row of the table: one rank, nothing to exchange."""

    name = "local"
    capturable = True
    collective = False
    symmetric = False

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Refuse a placement that leaves experts, or slices of them, to other ranks."""
        if problem.combine != "exact":
            return f"asked for the combine {problem.combine}; nothing comes back from another rank"
        if problem.alone:
            return None
        held = len(problem.local_experts)
        return (
            f"asked for {problem.placement}: {held} of {problem.spec.num_experts} experts; it exchanges nothing and "
            "needs every expert, whole, on this rank"
        )

    def wire_format(self, problem: Problem) -> str:
        """Return none."""
        return "none"

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return the assignments of ``tokens`` tokens."""
        return tokens * problem.spec.routing.top_k

    def capacity(self, problem: Problem) -> int:
        """Return the assignments of ``max_tokens`` tokens."""
        return problem.limits.max_tokens * problem.spec.routing.top_k

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return those of the order, and of the sum where it is not written to the caller's tensor."""
        rule, tokens, hidden = problem.spec.routing, problem.limits.max_tokens, problem.spec.expert_hidden_size
        smallest = (16, 16) if lists else ()
        rows = tokens * rule.top_k
        order = permute_regions(rows, problem.slots, block_t=smallest, weights=rule.weight_on_input)
        inside = problem.spec.latent_size is not None
        return order | (weighted_sum_regions(tokens, hidden, torch.float32) if inside else {})

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return nothing."""
        return NOTHING

    def build(self, problem: Problem) -> Local:
        """Return the dispatcher."""
        return Local(num_experts=problem.spec.num_experts, weight_on_input=problem.spec.routing.weight_on_input)
