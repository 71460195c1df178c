"""The dispatcher of one rank: sort assignments by expert, then weight the rows and sum them in slot order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

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
    """What ``combine`` needs.

    slots: the row of each assignment ``[T, K]``. weights: the factor of each row ``[T, K]``, or None.
    """

    slots: Tensor
    weights: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """All experts are on this rank. weight_on_input: the router weight multiplies the experts' input (Llama-4)."""

    num_experts: int
    weight_on_input: bool = False

    @property
    def expert_map(self) -> None:
        """None: experts do not move."""

    def rows(self, tokens: int, top_k: int) -> int:
        """Return the number of assignments of ``tokens`` tokens: each is a local row."""
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
        """Sort the assignments of ``x [T, H]`` by expert; for arguments see ``Dispatcher``.

        owners: ranks of the assignments, to which the experts write their rows.
        """
        input_weights = routing.topk_weights if self.weight_on_input else None
        order = permute(
            routing.topk_ids,
            self.num_experts,
            input_weights=input_weights,
            block_t=block_t,
            owners=owners,
            memory=memory,
        )
        remote = None
        if owners is not None and order.row_offsets is not None:
            remote = RemoteOutput(rows=owners.rows, offsets=order.row_offsets)
        batch = ContiguousBatch(
            x=x,
            source=order.source,
            expert_offsets=order.expert_offsets,
            input_weights=order.weights_by_row,
            tiles=order.tiles,
            # Without the memory of a pass, the inputs of ``permute`` may already have been reused.
            x_ready=memory is not None,
            remote=remote,
            slots=order.slots,
        )
        return batch, LocalHandle(slots=order.slots, weights=None if self.weight_on_input else routing.topk_weights)

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
        """Return ``[T, H]``: the weighted rows of each token summed in slot order, plus ``shared``, rounded once."""
        return weighted_sum(rows, handle.slots, handle.weights, dtype, shared=shared, out=out, memory=memory)

    def for_halves(self) -> Self:
        """Return this dispatcher."""
        return self

    def check(self) -> None:
        """Do nothing: a single rank has no errors to report."""


class LocalKind:
    """The dispatcher of one rank, which exchanges nothing."""

    name = "local"
    capturable = True
    collective = False
    symmetric = False
    partial_sums = False
    overlaps = ""
    no_half_batches = "tokens stay on their rank"
    fixed_messages = False

    def refuse(self, problem: Problem, *, requested: bool) -> str | None:
        """Refuse placements that leave experts, or slices of experts, to other ranks."""
        if problem.combine != "exact":
            return f"combine={problem.combine!r} was requested; it exchanges nothing, so only 'exact' applies"
        if problem.alone:
            return None
        count = len(problem.local_experts)
        return (
            f"the placement is {problem.placement}: {count} of {problem.spec.num_experts} experts; it exchanges "
            "nothing and needs all experts, unsliced, on this rank"
        )

    def wire_format(self, problem: Problem) -> str:
        """Return ``none``."""
        return "none"

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return the number of assignments of ``tokens`` tokens."""
        return tokens * problem.spec.routing.top_k

    def capacity(self, problem: Problem) -> int:
        """Return the number of assignments of ``max_tokens`` tokens."""
        return problem.limits.max_tokens * problem.spec.routing.top_k

    def batch_tokens(self, problem: Problem) -> int:
        """Return ``max_tokens``."""
        return problem.limits.max_tokens

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return the regions of the permutation, and of the sum unless it is written to the caller's tensor."""
        routing = problem.spec.routing
        tokens = problem.limits.max_tokens
        regions = permute_regions(
            tokens * routing.top_k,
            problem.slots,
            block_t=(16, 16) if lists else (),
            weights=routing.weight_on_input,
        )
        if problem.spec.latent_size is not None:
            regions |= weighted_sum_regions(tokens, problem.spec.expert_hidden_size, torch.float32)
        return regions

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return nothing."""
        return NOTHING

    def build(self, problem: Problem) -> Local:
        """Return the dispatcher."""
        return Local(num_experts=problem.spec.num_experts, weight_on_input=problem.spec.routing.weight_on_input)
