"""Placements as balancing sees them: what each slot holds, what that makes of a load, and what has to move.

Slots are a tuple a rank, in slot order, of logical expert ids; -1 is an empty slot. An expert is on a rank once at
most, and on any number of ranks; its copies share its assignments evenly, which is how an ``ExpertMap`` serves them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import ArrayLike, NDArray

__all__ = ["Move", "Slots", "aligned", "balancedness", "checked_load", "holders", "moves", "rank_loads", "widened"]

Slots: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One expert to be copied. source_rank, source_slot: where it is now; -1 where no rank has it."""

    expert: int
    source_rank: int
    source_slot: int
    rank: int
    slot: int


def checked_load(load: ArrayLike) -> NDArray[np.float64]:
    """Return assignments ``[..., E]`` as float64; raises InputError for what is negative or not finite."""
    found = np.asarray(load, dtype=np.float64)
    if found.ndim < 1 or not found.size or not np.isfinite(found).all() or (found < 0).any():
        raise InputError(
            f"load: found shape {found.shape}, least {found.min(initial=0)}, largest {found.max(initial=0)}; needed "
            "are assignments [..., E], finite and not negative"
        )
    return found


def holders(slots: Slots, experts: int) -> NDArray[np.bool_]:
    """Return ``[W, E]``: which rank has which expert. Raises InputError for an id unknown or twice on a rank."""
    found = np.zeros((len(slots), experts), dtype=bool)
    for rank, own in enumerate(slots):
        held = [expert for expert in own if expert != -1]
        if len(set(held)) != len(held) or not all(0 <= expert < experts for expert in held):
            raise InputError(
                f"placement: rank {rank} has {list(own)}; allowed are experts 0 to {experts - 1}, each once on a rank, "
                "and -1 for an empty slot"
            )
        found[rank, held] = True
    return found


def rank_loads(load: ArrayLike, slots: Slots) -> NDArray[np.float64]:
    """Return the assignments of every rank ``[..., W]`` for those of every expert ``[..., E]``.

    Raises InputError for an expert with a load that no rank has.
    """
    wanted = checked_load(load)
    held = holders(slots, wanted.shape[-1])
    copies = held.sum(axis=0)
    lost = np.flatnonzero((copies == 0) & (wanted.reshape(-1, len(copies)).sum(axis=0) > 0))
    if lost.size:
        raise InputError(
            f"placement: no rank has experts {lost[:8].tolist()}, which the load asks for; place every expert first"
        )
    return wanted @ (held / np.maximum(copies, 1)).T


def balancedness(load: ArrayLike, slots: Slots) -> float:
    """Return mean over busiest rank, in (0, 1], of a layer's load: ``[E]``, or ``[S, E]`` with a row for each step.

    Ranks wait for each other at every step, so of several steps it is the sum of means over the sum of maxima. 1.0
    where nothing was asked.
    """
    found = rank_loads(load, slots)
    busiest = float(found.max(axis=-1).sum())
    return float(found.mean(axis=-1).sum()) / busiest if busiest else 1.0


def widened(slots: Slots, width: int) -> Slots:
    """Return ``slots`` with empty ones added until every rank has ``width``; raises InputError where one has more."""
    if any(len(own) > width for own in slots):
        raise InputError(f"placement: ranks have {[len(own) for own in slots]} slots, asked for {width}; ask for more")
    return tuple(own + (-1,) * (width - len(own)) for own in slots)


def aligned(current: Slots, held: Sequence[Collection[int]]) -> Slots:
    """Return the slots of ranks that are to hold ``held``: what stays keeps its slot, the rest follows by lowest id."""
    made: list[tuple[int, ...]] = []
    for own, wanted in zip(current, held, strict=True):
        new = iter(sorted(set(wanted) - set(own)))
        made.append(tuple(expert if expert in wanted else next(new, -1) for expert in own))
    return tuple(made)


def moves(old: Slots, new: Slots) -> tuple[Move, ...]:
    """Return the copies that make ``new`` of ``old``, by rank and slot.

    An expert comes from its own rank where that has it, else from the rank that was asked for the fewest so far. A
    destination may hold what another move still reads: read all sources first, or in stages.
    """
    if len(old) != len(new):
        raise InputError(f"moves: from {len(old)} to {len(new)} ranks was asked; both need the same ranks")
    where: dict[int, list[tuple[int, int]]] = {}
    for rank, own in enumerate(old):
        for slot, expert in enumerate(own):
            where.setdefault(expert, []).append((rank, slot))
    asked: Counter[int] = Counter()

    def source(expert: int, rank: int) -> tuple[int, int]:
        found = where.get(expert, [(-1, -1)])
        best = min(found, key=lambda place: (place[0] != rank, asked[place[0]], place))
        asked[best[0]] += 1
        return best

    made: list[Move] = []
    for rank, own in enumerate(new):
        for slot, expert in enumerate(own):
            before: Any = old[rank][slot] if slot < len(old[rank]) else -1
            if expert not in (-1, before):
                found = source(expert, rank)
                made.append(Move(expert=expert, source_rank=found[0], source_slot=found[1], rank=rank, slot=slot))
    return tuple(made)
