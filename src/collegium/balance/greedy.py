"""The policy ``greedy``: replicate the most loaded experts, then pack the heaviest first on the least loaded rank."""

from __future__ import annotations

import heapq
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import InputError
from .local_search import best_swap
from .slots import aligned, balancedness, checked_load, holders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from .slots import Slots

__all__ = ["greedy", "host_of"]


class _Part(NamedTuple):
    """Ranks and experts that are packed separately."""

    ranks: list[int]
    experts: list[int]


def greedy(load: ArrayLike, current: Slots, *, hosts: int = 1, groups: int = 1) -> Slots:
    """Return a placement for ``load [E]`` in the slots of ``current``, never less balanced than ``current``.

    The packed placement is refined by single changes while one relieves the busiest rank; a slot stays empty if every
    replica would add load to a rank. hosts: number of equal runs of consecutive ranks. groups: number of equal runs of
    consecutive experts that a token chooses together. With several of both, each group goes to one host with all
    replicas of its experts, and balance comes second. ``current`` may lack experts, of a rank that is gone. Ties go to
    the lowest id. Raises InputError where the experts do not fit, or the groups not on the hosts.
    """
    loads = checked_load(load)
    is_held = holders(current, len(loads))
    sizes = [len(rank_slots) for rank_slots in current]
    if sum(sizes) < len(loads):
        raise InputError(f"greedy: {len(loads)} experts do not fit in {sum(sizes)} slots; give more slots a rank")
    packed: list[set[int]] = [set() for _ in current]
    parts = _parts(loads, sizes, hosts, groups)
    for part in parts:
        _pack(loads, part, sizes, packed)
        _keep_on_ranks(current, part.ranks, packed)
    result = aligned(current, packed)
    host_indices = np.array(host_of(len(sizes), len(parts)))
    for _ in range(sum(sizes)):
        better = best_swap(loads, result, host_indices)
        if better is None:
            break
        result = better
    result = aligned(current, [set(rank_slots) - {-1} for rank_slots in result])
    follows_parts = all({-1, *part.experts}.issuperset(current[rank]) for part in parts for rank in part.ranks)
    complete = is_held.any(axis=0).all()
    if follows_parts and complete and balancedness(loads, current) >= balancedness(loads, result):
        return current
    return result


def host_of(ranks: int, hosts: int) -> list[int]:
    """Return the host of every rank; raises InputError where hosts are not equally large."""
    if hosts < 1 or ranks % hosts:
        raise InputError(
            f"hosts: {ranks} ranks were requested on {hosts} hosts; each host needs the same number of ranks"
        )
    return [rank * hosts // ranks for rank in range(ranks)]


def _parts(loads: NDArray[np.float64], sizes: Sequence[int], hosts: int, groups: int) -> list[_Part]:
    """Return the parts that are packed separately: one for each host, or one for all."""
    host_indices = host_of(len(sizes), hosts)
    experts = len(loads)
    if groups < 1 or experts % groups:
        raise InputError(f"groups: {experts} experts were requested in {groups} groups; each needs the same number")
    if hosts == 1 or groups == 1:
        return [_Part(list(range(len(sizes))), list(range(experts)))]
    group_size = experts // groups
    ranks = [[rank for rank, index in enumerate(host_indices) if index == host] for host in range(hosts)]
    free_groups = [sum(sizes[rank] for rank in host_ranks) // group_size for host_ranks in ranks]
    if sum(free_groups) < groups:
        raise InputError(
            f"hosts: {groups} groups of {group_size} experts were requested on hosts with room for {free_groups}; give "
            "more slots a rank, or do not name hosts"
        )
    group_loads = [float(loads[g * group_size : (g + 1) * group_size].sum()) for g in range(groups)]
    host_loads = [0.0] * hosts
    host_experts = [list[int]() for _ in range(hosts)]
    for group in sorted(range(groups), key=lambda g: (-group_loads[g], g)):
        host = min((h for h in range(hosts) if free_groups[h]), key=lambda h: (host_loads[h], h))
        free_groups[host] -= 1
        host_loads[host] += group_loads[group]
        host_experts[host] += range(group * group_size, (group + 1) * group_size)
    return [_Part(ranks[host], sorted(host_experts[host])) for host in range(hosts)]


def _pack(loads: NDArray[np.float64], part: _Part, sizes: Sequence[int], packed: list[set[int]]) -> None:
    """Fill ``packed`` of the ranks of ``part`` with its experts and their replicas."""
    ranks = part.ranks
    slots = sum(sizes[rank] for rank in ranks)
    replicas = _replicas(loads, part.experts, slots, sum(sizes[rank] > 0 for rank in ranks))
    replica_load = {expert: float(loads[expert]) / count for expert, count in replicas.items()}
    rank_load = dict.fromkeys(ranks, 0.0)

    def put(expert: int, rank: int) -> None:
        packed[rank].add(expert)
        rank_load[rank] += replica_load[expert]

    for expert in sorted(replicas, key=lambda e: (-replica_load[e], e)):
        for _ in range(replicas[expert]):
            free = [rank for rank in ranks if len(packed[rank]) < sizes[rank]]
            candidates = [rank for rank in free if expert not in packed[rank]]
            if candidates:
                put(expert, min(candidates, key=lambda rank: (rank_load[rank], rank)))
                continue
            # Only ranks that hold it are free: another expert moves there, or this replica is given up.
            swaps: list[tuple[float, int, int, int]] = []
            for rank, to in product((rank for rank in ranks if expert not in packed[rank]), free):
                for other in packed[rank] - packed[to]:
                    load_there = rank_load[to] + replica_load[other]
                    load_here = rank_load[rank] - replica_load[other] + replica_load[expert]
                    swaps.append((max(load_there, load_here), other, rank, to))
            if swaps:
                _, other, rank, to = min(swaps)
                packed[rank].remove(other)
                rank_load[rank] -= replica_load[other]
                put(other, to)
                put(expert, rank)


def _replicas(loads: NDArray[np.float64], experts: Sequence[int], slots: int, max_replicas: int) -> dict[int, int]:
    """Return the number of replicas of each expert: the next one is of the expert with the most loaded replica."""
    replicas = dict.fromkeys(experts, 1)
    queue = [(-float(loads[expert]), expert) for expert in experts if loads[expert] > 0 and max_replicas > 1]
    heapq.heapify(queue)
    for _ in range(slots - len(experts)):
        if not queue:
            break
        _, expert = heapq.heappop(queue)
        replicas[expert] += 1
        if replicas[expert] < max_replicas:
            heapq.heappush(queue, (-float(loads[expert]) / replicas[expert], expert))
    return replicas


def _keep_on_ranks(current: Slots, ranks: Sequence[int], packed: list[set[int]]) -> None:
    """Assign to each rank the packed set that shares most with its current experts, so that fewer experts move.

    Sets are exchanged among ranks with the same number of slots.
    """
    pairs = sorted(
        (-len(packed[source] & set(current[rank])), rank, source)
        for rank in ranks
        for source in ranks
        if len(current[rank]) == len(current[source])
    )
    source_of: dict[int, int] = {}
    for _, rank, source in pairs:
        if rank not in source_of and source not in source_of.values():
            source_of[rank] = source
    reassigned = {rank: packed[source] for rank, source in source_of.items()}
    for rank, experts in reassigned.items():
        packed[rank] = experts
