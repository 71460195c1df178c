"""The policy ``greedy``: copies for the most loaded experts, then the heaviest first on the least loaded rank."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from .local_search import best_swap
from .slots import aligned, balancedness, checked_load, holders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from .slots import Slots

__all__ = ["greedy", "host_of"]


def greedy(load: ArrayLike, current: Slots, *, hosts: int = 1, groups: int = 1) -> Slots:
    """Return a placement for ``load [E]`` in the slots of ``current``, never less balanced than that one.

    What was packed is refined by single changes while one relieves the busiest rank; a slot stays empty where every
    copy would load a rank more. hosts: equal runs of consecutive ranks; groups: equal runs of consecutive experts that
    a token chooses together. With several of both each group goes to one host with all
    copies of its experts, and balance comes second. ``current`` may lack experts, of a rank that is gone. Ties go to
    the lowest id. Raises InputError where the experts do not fit, or the groups not on the hosts.
    """
    loads = checked_load(load)
    held = holders(current, len(loads))
    sizes = [len(own) for own in current]
    if sum(sizes) < len(loads):
        raise InputError(
            f"greedy: {len(loads)} experts were asked to fit in {sum(sizes)} slots; give more slots a rank"
        )
    packed: list[set[int]] = [set() for _ in current]
    parts = _parts(loads, sizes, hosts, groups)
    for ranks, experts in parts:
        _pack(loads, experts, ranks, sizes, packed)
        _keep_names(current, ranks, packed)
    made = aligned(current, packed)
    where = np.array(host_of(len(sizes), len(parts)))
    for _ in range(sum(sizes)):
        better = best_swap(loads, made, where)
        if better is None:
            break
        made = better
    made = aligned(current, [set(own) - {-1} for own in made])
    tidy = all({-1, *experts}.issuperset(current[rank]) for ranks, experts in parts for rank in ranks)
    if tidy and held.any(axis=0).all() and balancedness(loads, current) >= balancedness(loads, made):
        return current
    return made


def host_of(ranks: int, hosts: int) -> list[int]:
    """Return the host of every rank; raises InputError where hosts are not equally large."""
    if hosts < 1 or ranks % hosts:
        raise InputError(f"hosts: {ranks} ranks were asked on {hosts} hosts; each host needs the same number of ranks")
    return [rank * hosts // ranks for rank in range(ranks)]


def _parts(
    loads: NDArray[np.float64], sizes: Sequence[int], hosts: int, groups: int
) -> list[tuple[list[int], list[int]]]:
    """Return (ranks, experts) that are packed by themselves: of each host, or of all."""
    where, experts = host_of(len(sizes), hosts), len(loads)
    if groups < 1 or experts % groups:
        raise InputError(f"groups: {experts} experts were asked in {groups} groups; each needs the same number")
    if hosts == 1 or groups == 1:
        return [(list(range(len(sizes))), list(range(experts)))]
    each = experts // groups
    ranks = [[rank for rank, host in enumerate(where) if host == own] for own in range(hosts)]
    room = [sum(sizes[rank] for rank in own) // each for own in ranks]
    if sum(room) < groups:
        raise InputError(
            f"hosts: {groups} groups of {each} experts were asked on hosts with room for {room}; give more slots "
            "a rank, or do not name hosts"
        )
    weights = [float(loads[g * each : (g + 1) * each].sum()) for g in range(groups)]
    taken, chosen = [0.0] * hosts, [list[int]() for _ in range(hosts)]
    for group in sorted(range(groups), key=lambda g: (-weights[g], g)):
        host = min((h for h in range(hosts) if room[h]), key=lambda h: (taken[h], h))
        room[host] -= 1
        taken[host] += weights[group]
        chosen[host] += range(group * each, (group + 1) * each)
    return [(ranks[host], sorted(chosen[host])) for host in range(hosts)]


def _pack(
    loads: NDArray[np.float64], experts: Sequence[int], ranks: Sequence[int], sizes: Sequence[int], held: list[set[int]]
) -> None:
    """Fill ``held`` of ``ranks`` with ``experts`` and their copies."""
    copies = _copies(loads, experts, sum(sizes[rank] for rank in ranks), sum(sizes[rank] > 0 for rank in ranks))
    weight = {expert: float(loads[expert]) / count for expert, count in copies.items()}
    taken = dict.fromkeys(ranks, 0.0)

    def put(expert: int, rank: int) -> None:
        held[rank].add(expert)
        taken[rank] += weight[expert]

    for expert in sorted(copies, key=lambda e: (-weight[e], e)):
        for _ in range(copies[expert]):
            free = [rank for rank in ranks if len(held[rank]) < sizes[rank]]
            open_ = [rank for rank in free if expert not in held[rank]]
            if open_:
                put(expert, min(open_, key=lambda rank: (taken[rank], rank)))
                continue
            # Only ranks that have it are free: another expert makes room, or this copy is one too many.
            ways = [
                (max(taken[to] + weight[other], taken[rank] - weight[other] + weight[expert]), other, rank, to)
                for rank in ranks
                if expert not in held[rank]
                for to in free
                for other in held[rank] - held[to]
            ]
            if ways:
                _, other, rank, to = min(ways)
                held[rank].remove(other)
                taken[rank] -= weight[other]
                put(other, to)
                put(expert, rank)


def _copies(loads: NDArray[np.float64], experts: Sequence[int], slots: int, most: int) -> dict[int, int]:
    """Return how many copies each expert gets: the next one is of the most loaded copy, up to ``most`` of an expert."""
    copies = dict.fromkeys(experts, 1)
    waiting = [(-float(loads[expert]), expert) for expert in experts if loads[expert] > 0 and most > 1]
    heapq.heapify(waiting)
    for _ in range(slots - len(experts)):
        if not waiting:
            break
        _, expert = heapq.heappop(waiting)
        copies[expert] += 1
        if copies[expert] < most:
            heapq.heappush(waiting, (-float(loads[expert]) / copies[expert], expert))
    return copies


def _keep_names(current: Slots, ranks: Sequence[int], held: list[set[int]]) -> None:
    """Give each rank the set that shares most with what it has, among ranks of a size: fewer experts move."""
    pairs = sorted(
        (-len(held[made] & set(current[rank])), rank, made)
        for rank in ranks
        for made in ranks
        if len(current[rank]) == len(current[made])
    )
    found: dict[int, int] = {}
    for _, rank, made in pairs:
        if rank not in found and made not in found.values():
            found[rank] = made
    packed = {rank: held[made] for rank, made in found.items()}
    for rank, own in packed.items():
        held[rank] = own
