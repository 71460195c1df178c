"""The table of policies, and an estimate of whether a new placement is worth its moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InputError
from .greedy import greedy
from .least_moves import least_moves
from .slots import rank_loads

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from .slots import Slots

__all__ = ["POLICIES", "Policy", "policy_named", "saved_seconds", "should_move"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A row of the table. place: ``(load [E], current, hosts=, groups=)`` to new slots, pure."""

    name: str
    description: str
    place: Callable[..., Slots]


POLICIES: tuple[Policy, ...] = (
    Policy(name="greedy", description="replicate, then pack, whatever has to move", place=greedy),
    Policy(
        name="least_moves",
        description="nearly greedy's balance of sums, with few experts moved",
        place=least_moves,
    ),
)


def policy_named(name: str) -> Policy:
    """Return the policy ``name``; raises InputError with the names of all policies."""
    policy = next((row for row in POLICIES if row.name == name), None)
    if policy is None:
        raise InputError(f"policy {name!r} was requested; known: {', '.join(row.name for row in POLICIES)}")
    return policy


def saved_seconds(load: ArrayLike, old: Slots, new: Slots, *, seconds_per_assignment: float) -> float:
    """Return the predicted savings of a step of one layer in seconds; negative for a loss.

    load: assignments of one step ``[E]``, or of several ``[S, E]``, of which the mean is taken. A step takes as long as
    its busiest rank.
    """
    before, after = (float(rank_loads(load, slots).max(axis=-1).mean()) for slots in (old, new))
    return (before - after) * seconds_per_assignment


def should_move(
    load: ArrayLike,
    old: Slots,
    new: Slots,
    *,
    nbytes: int,
    steps: int,
    seconds_per_byte: float,
    seconds_per_assignment: float,
) -> bool:
    """Return whether ``steps`` steps like ``load`` save more time than moving ``nbytes`` takes."""
    saved = steps * saved_seconds(load, old, new, seconds_per_assignment=seconds_per_assignment)
    return saved > nbytes * seconds_per_byte
