"""A row of the table of dispatchers as a placement needs it: the same tokens on every rank, slices of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dispatch_wrapper import DispatchWrapperKind
from .partial import PartialKind
from .same_tokens import SameTokensKind
from .slices import SlicesKind

if TYPE_CHECKING:
    from ..problem import Problem
    from .base import DispatcherKind

__all__ = ["batch_tokens", "wrapped_for"]


def wrapped_for(kind: DispatcherKind, problem: Problem) -> DispatcherKind:
    """Return ``kind`` inside what the placement of ``problem`` asks for; ``partial``, which adds nothing, as it is."""
    placed = problem.placement
    if placed is None or isinstance(kind, PartialKind):
        return kind
    if placed.tp_size > 1:
        kind = SlicesKind(kind, placed)
    # Outside, so that slices are summed of a share of the tokens.
    return SameTokensKind(kind, placed) if placed.same_tokens and placed.world_size > 1 else kind


def batch_tokens(kind: DispatcherKind, problem: Problem) -> int:
    """Return the most tokens in one batch of this rank's experts."""
    if isinstance(kind, DispatchWrapperKind):
        return batch_tokens(kind.inner, kind.inner_problem(problem))
    return problem.limits.max_tokens * (problem.world_size if kind.collective else 1)
