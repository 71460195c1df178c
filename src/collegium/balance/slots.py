"""Placements as balancing uses them: the contents of slots, the resulting load of ranks, and the moves between two.

Slots are a tuple for each rank, in slot order, of logical expert ids; -1 is an empty slot. An expert may be in any
slots; its replicas share its assignments evenly, as in an ``ExpertMap``. Policies place at most one on a rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ..errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Move",
    "Slots",
    "aligned",
    "balancedness",
    "checked_load",
    "holders",
    "moves",
    "rank_loads",
    "slot_counts",
    "widened",
]

Slots: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One expert to copy. source_rank, source_slot: its current slot, -1 if no rank has it."""

    expert: int
    source_rank: int
    source_slot: int
    rank: int
    slot: int


def checked_load(load: ArrayLike) -> NDArray[np.float64]:
    """Return assignments ``[..., E]`` as float64; raises InputError for negative or non-finite numbers."""
    loads = np.asarray(load, dtype=np.float64)
    if loads.ndim < 1 or not loads.size or not np.isfinite(loads).all() or (loads < 0).any():
        raise InputError(
            f"load: found shape {loads.shape}, least {loads.min(initial=0)}, largest {loads.max(initial=0)}; needed "
            "are assignments [..., E], finite and not negative"
        )
    return loads


def slot_counts(slots: Slots, experts: int) -> NDArray[np.int64]:
    """Return ``[W, E]``: in how many slots of each rank each expert is. Raises InputError for an unknown id."""
    counts = np.zeros((len(slots), experts), dtype=np.int64)
    for rank, rank_slots in enumerate(slots):
        ids = [expert for expert in rank_slots if expert != -1]
        if not all(0 <= expert < experts for expert in ids):
            raise InputError(
                f"placement: rank {rank} has {list(rank_slots)}; allowed are experts 0 to {experts - 1} and -1 for an "
                "empty slot"
            )
        np.add.at(counts[rank], ids, 1)
    return counts


def holders(slots: Slots, experts: int) -> NDArray[np.bool_]:
    """Return ``[W, E]``: which rank has which expert. Raises InputError for an unknown id."""
    return slot_counts(slots, experts) > 0


def rank_loads(load: ArrayLike, slots: Slots) -> NDArray[np.float64]:
    """Return the assignments of every rank ``[..., W]`` for those of every expert ``[..., E]``.

    Raises InputError for an expert with a load that no rank has.
    """
    loads = checked_load(load)
    counts = slot_counts(slots, loads.shape[-1])
    replicas = counts.sum(axis=0)
    missing = np.flatnonzero((replicas == 0) & (loads.reshape(-1, len(replicas)).sum(axis=0) > 0))
    if missing.size:
        raise InputError(
            f"placement: no rank has experts {missing[:8].tolist()}, which have a load; place every expert first"
        )
    return loads @ (counts / np.maximum(replicas, 1)).T


def balancedness(load: ArrayLike, slots: Slots) -> float:
    """Return mean over busiest rank, in (0, 1], of a layer's load: ``[E]``, or ``[S, E]`` with a row for each step.

    Ranks wait for each other in every step, so for several steps it is the sum of means over the sum of maxima. 1.0
    without any load.
    """
    loads = rank_loads(load, slots)
    busiest = float(loads.max(axis=-1).sum())
    return float(loads.mean(axis=-1).sum()) / busiest if busiest else 1.0


def widened(slots: Slots, width: int) -> Slots:
    """Return ``slots`` with empty slots added until every rank has ``width``; raises InputError where one has more."""
    widths = [len(rank_slots) for rank_slots in slots]
    if any(count > width for count in widths):
        raise InputError(f"placement: ranks have {widths} slots, requested are {width}; request more")
    return tuple(rank_slots + (-1,) * (width - len(rank_slots)) for rank_slots in slots)


def aligned(current: Slots, experts: Sequence[Collection[int]]) -> Slots:
    """Return slots with the ``experts`` of each rank: those that stay keep their slot, the rest follow by lowest id.

    Of an expert in several slots of a rank the first one stays.
    """
    result: list[tuple[int, ...]] = []
    for rank_slots, rank_experts in zip(current, experts, strict=True):
        arrivals = iter(sorted(set(rank_experts) - set(rank_slots)))
        row: list[int] = []
        for expert in rank_slots:
            stays = expert in rank_experts and expert not in row
            row.append(expert if stays else next(arrivals, -1))
        result.append(tuple(row))
    return tuple(result)


class _Location(NamedTuple):
    rank: int
    slot: int


def moves(old: Slots, new: Slots) -> tuple[Move, ...]:
    """Return the copies that turn ``old`` into ``new``, by rank and slot.

    An expert is copied from the same rank if that has it, else from the rank that is the source of the fewest copies so
    far. A destination may hold what another move still reads: read all sources first, or move in stages.
    """
    if len(old) != len(new):
        raise InputError(f"moves: from {len(old)} to {len(new)} ranks was requested; both need the same ranks")
    locations: dict[int, list[_Location]] = {}
    for rank, rank_slots in enumerate(old):
        for slot, expert in enumerate(rank_slots):
            locations.setdefault(expert, []).append(_Location(rank, slot))
    copies_from: Counter[int] = Counter()

    def source_of(expert: int, rank: int) -> _Location:
        candidates = locations.get(expert, [_Location(-1, -1)])
        source = min(candidates, key=lambda location: (location.rank != rank, copies_from[location.rank], location))
        copies_from[source.rank] += 1
        return source

    result: list[Move] = []
    for rank, rank_slots in enumerate(new):
        for slot, expert in enumerate(rank_slots):
            previous = old[rank][slot] if slot < len(old[rank]) else -1
            if expert not in (-1, previous):
                source = source_of(expert, rank)
                result.append(
                    Move(expert=expert, source_rank=source.rank, source_slot=source.slot, rank=rank, slot=slot)
                )
    return tuple(result)
