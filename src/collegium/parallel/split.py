"""What all dispatchers that send tokens between ranks ask of a placement, and check when they are built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .groups import check_ranks
from .meeting import meeting_of

if TYPE_CHECKING:
    from ..problem import Placement, Problem

__all__ = ["checked_placement", "refuse_split"]


def refuse_split(problem: Problem) -> str | None:
    """Return why experts cannot be split over the ranks of ``problem``, or None.

    Refused are one rank, placements that tell of no other rank, ranks without an expert, and experts that are nowhere.
    """
    placed = problem.placement
    if placed is None or placed.world_size == 1:
        return "asked for one rank; it exchanges tokens between ranks"
    if not placed.ranks:
        return f"asked for {placed} without Placement.ranks; it has to know what every rank holds"
    empty = [rank for rank, held in enumerate(placed.ranks) if not held]
    if empty:
        return f"asked for {problem.spec.num_experts} experts on {placed.world_size} ranks; rank {empty[0]} has none"
    missing = set(range(problem.spec.num_experts)).difference(*placed.ranks)
    if missing:
        return f"asked for ranks none of which holds experts {sorted(missing)[:8]}; each has to be somewhere"
    return None


def checked_placement(name: str, problem: Problem) -> Placement:
    """Return the placement once all ranks have agreed that they build the same layer; all ranks ask at the same time.

    name: of the dispatcher. Raises InputError on every rank where torch.distributed has other ranks than the placement,
    or where the ranks were planned for different layers, and RankError where one does not come.
    """
    placed = problem.placement
    assert placed is not None
    check_ranks(name, placed)
    asked = (problem.spec, problem.limits, problem.dtype, problem.activation_format, placed.ranks, placed.spare)
    meeting_of(placed.group).agree(repr(asked), f"{name}: building a layer")
    return placed
