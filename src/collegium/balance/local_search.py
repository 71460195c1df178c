"""The best single change of a placement that relieves the busiest rank; both policies refine with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from .slots import holders, rank_loads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .slots import Slots

__all__ = ["best_swap"]

_MIN_GAIN = 1e-9  # of the busiest rank's load; less is rounding


class _Change(IntEnum):
    """Kinds of changes, as indices of the array of gains."""

    COPY = 0  # a replica goes to another rank's slot
    SWAP = 1  # two experts trade slots
    DISPLACE = 2  # a replica takes another rank's slot, whose expert goes to an empty slot of the busiest rank
    DROP = 3  # a replica is given up


def best_swap(loads: NDArray[np.float64], slots: Slots, hosts_of: NDArray[np.int64]) -> Slots | None:
    """Return ``slots`` after the change that relieves the busiest rank most for each expert moved, None without one.

    hosts_of: the host of every rank; experts do not leave their host. After the change every rank that it affects has
    less load than the busiest rank had, so repeated changes end.
    """
    is_held = holders(slots, len(loads))
    busy = int(rank_loads(loads, slots).argmax())
    neighbours = [rank for rank in np.flatnonzero(hosts_of == hosts_of[busy]).tolist() if rank != busy]
    targets = [(rank, slot) for rank in neighbours for slot in range(len(slots[rank]))]
    candidates = np.flatnonzero(is_held[busy])
    if not targets or not candidates.size:
        return None
    changes = _Changes(
        loads=loads,
        is_held=is_held,
        busy=busy,
        candidates=candidates,
        target_rank=np.array([rank for rank, _ in targets]),
        target_expert=np.array([slots[rank][slot] for rank, slot in targets]),
    )
    busy_load = float(rank_loads(loads, slots)[busy])
    peaks = np.stack([changes.copy(), changes.swap(), changes.displace(has_empty=-1 in slots[busy]), changes.drop()])
    gain = busy_load - peaks
    gain[gain <= _MIN_GAIN * busy_load] = -np.inf
    gain[_Change.SWAP : _Change.DROP, :, changes.target_expert >= 0] /= 2  # two experts move
    kind, candidate, target = (int(index) for index in np.unravel_index(gain.argmax(), gain.shape))
    if not np.isfinite(gain[kind, candidate, target]):
        return None
    return _apply(slots, busy, int(candidates[candidate]), targets[target], _Change(kind))


def _apply(slots: Slots, busy: int, expert: int, target: tuple[int, int], change: _Change) -> Slots:
    """Return ``slots`` after ``change`` of an ``expert`` of rank ``busy`` with the slot ``target`` of another rank."""
    result = [list(rank_slots) for rank_slots in slots]
    busy_slot = result[busy].index(-1 if change is _Change.DISPLACE else expert)
    if change is _Change.DROP:
        result[busy][busy_slot] = -1
    else:
        target_rank, target_slot = target
        target_expert = result[target_rank][target_slot]
        result[target_rank][target_slot] = expert
        if change is not _Change.COPY:
            result[busy][busy_slot] = target_expert
    return tuple(map(tuple, result))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Changes:
    """All changes of an expert of the busiest rank and a slot of another rank.

    is_held: ``[W, E]``. candidates: experts of rank ``busy``. target_rank, target_expert: of each slot its rank and
    expert, -1 for none. Methods return ``[candidates, slots]``: the highest load among the affected ranks after the
    change, infinite where it is not allowed.
    """

    loads: NDArray[np.float64]
    is_held: NDArray[np.bool_]
    busy: int
    candidates: NDArray[np.int64]
    target_rank: NDArray[np.int64]
    target_expert: NDArray[np.int64]

    @property
    def replicas(self) -> NDArray[np.int64]:
        """Number of replicas of each expert."""
        return self.is_held.sum(axis=0)

    def rank_load(self) -> NDArray[np.float64]:
        """Return the current load of each rank."""
        return self.is_held @ (self.loads / self.replicas)

    def replica_load(self, ids: NDArray[np.int64], added: int = 0) -> NDArray[np.float64]:
        """Return the load of one replica of each expert after adding ``added`` replicas; 0 for no expert."""
        return np.where(ids < 0, 0.0, self.loads[ids] / np.maximum(self.replicas[ids] + added, 1))

    def swap(self) -> NDArray[np.float64]:
        """Evaluate trading slots with another rank's expert, or moving to an empty slot."""
        allowed = (self.target_expert < 0) | ~self.is_held[self.busy, self.target_expert]
        load = self.replica_load(self.candidates)
        return self._exchange(load, load, allowed)

    def displace(self, *, has_empty: bool) -> NDArray[np.float64]:
        """Evaluate a replica in a slot whose expert goes to an empty slot of the busiest rank, if it has one."""
        allowed = (self.target_expert >= 0) & ~self.is_held[self.busy, self.target_expert] & has_empty
        shared = self.replica_load(self.candidates, 1)
        return self._exchange(self.replica_load(self.candidates) - shared, shared, allowed)

    def _exchange(
        self, leaving: NDArray[np.float64], arriving: NDArray[np.float64], allowed: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Evaluate load that leaves the busiest rank and arrives at the target, whose expert returns."""
        returning = self.replica_load(self.target_expert)
        rank_load = self.rank_load()
        busy_load = rank_load[self.busy] - leaving[:, None] + returning
        target_load = rank_load[self.target_rank] + arriving[:, None] - returning
        return np.where(self._target_lacks() & allowed, np.maximum(busy_load, target_load), np.inf)

    def drop(self) -> NDArray[np.float64]:
        """Evaluate giving up a replica that is not the last; the same for every slot."""
        increase = self.replica_load(self.candidates, -1) - self.replica_load(self.candidates)
        affected = self.is_held[:, self.candidates]
        affected[self.busy] = False
        peak = np.where(affected, self.rank_load()[:, None] + increase, -np.inf).max(axis=0)
        peak = np.maximum(peak, self.rank_load()[self.busy] - self.replica_load(self.candidates))
        peak = np.where(self.replicas[self.candidates] > 1, peak, np.inf)
        return peak[:, None].repeat(len(self.target_expert), axis=1)

    def copy(self) -> NDArray[np.float64]:
        """Evaluate a replica in an empty slot, or in place of a replica that is not the last."""
        allowed = (self.target_expert < 0) | (self.replicas[self.target_expert] > 1)
        load_after = self.replica_load(self.candidates, 1)
        overwritten_load_after = self.replica_load(self.target_expert, -1)
        holds_candidate = self.is_held[:, self.candidates]
        holds_target = self.is_held[:, self.target_expert] & (self.target_expert >= 0)
        change = (holds_candidate * (load_after - self.replica_load(self.candidates)))[:, :, None]
        overwritten_change = overwritten_load_after - self.replica_load(self.target_expert)
        change = change + (holds_target * overwritten_change)[:, None, :]
        affected = holds_candidate[:, :, None] | holds_target[:, None, :]
        index = np.arange(len(self.target_rank))
        # The slot's rank loses its replica, so it takes over nothing of what the other replicas share.
        change[self.target_rank, :, index] += load_after[None, :] - overwritten_load_after[:, None]
        affected[self.target_rank, :, index] = True
        peak = np.where(affected, self.rank_load()[:, None, None] + change, -np.inf).max(axis=0)
        return np.where(self._target_lacks() & allowed, peak, np.inf)

    def _target_lacks(self) -> NDArray[np.bool_]:
        """Return ``[candidates, slots]``: whether the slot's rank does not hold the candidate."""
        return ~self.is_held[self.target_rank][:, self.candidates].T
