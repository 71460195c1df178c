"""The table of dispatchers, and the wrappers that a placement puts around a row of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .all_gather import AllGatherKind
from .all_to_all import AllToAllKind
from .all_to_all_fixed import AllToAllFixedKind
from .local import LocalKind
from .partial import PartialKind
from .same_tokens import SameTokensKind
from .slices import SlicesKind
from .symm_mem import SymmMemKind

if TYPE_CHECKING:
    from ..problem import Problem
    from .base import DispatcherKind

__all__ = ["DISPATCHERS", "wrapped_for"]

# In order of preference.
DISPATCHERS: tuple[DispatcherKind, ...] = (
    LocalKind(),
    SymmMemKind(),
    AllToAllKind(),
    AllGatherKind(),
    # Sends padding, so it comes after the collectives; those cannot be captured in a CUDA graph.
    AllToAllFixedKind(),
    PartialKind(),
)


def wrapped_for(kind: DispatcherKind, problem: Problem) -> DispatcherKind:
    """Return ``kind`` with the wrappers that the placement of ``problem`` requires; partial sums take none."""
    placement = problem.placement
    if placement is None or kind.partial_sums:
        return kind
    if placement.tp_size > 1:
        kind = SlicesKind(kind, placement)
    # SameTokens wraps Slices, so that the slices of a share of the tokens are summed, not those of all tokens.
    if placement.same_tokens and placement.world_size > 1:
        kind = SameTokensKind(kind, placement)
    return kind
