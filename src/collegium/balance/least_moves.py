"""The policy ``least_moves``: from where experts are, the changes that gain most for each expert that has to move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .greedy import greedy, host_of
from .slots import aligned, balancedness, checked_load, holders, rank_loads

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from .slots import Slots

__all__ = ["TOLERANCE", "least_moves"]

TOLERANCE = 0.02  # of balancedness: as good as greedy's up to this is good enough
_PAYS = 1e-9  # of the busiest rank's load; less is rounding


def least_moves(load: ArrayLike, current: Slots, *, hosts: int = 1, groups: int = 1) -> Slots:
    """Return a placement for ``load [E]`` in the slots of ``current``, never less balanced, with few experts moved.

    Takes the busiest rank's best change again and again: swap an expert with another rank's, move it to an empty slot,
    copy it to an empty slot or over a copy that is not the last, or copy it over an expert that moves to an empty slot
    here. Ends within ``TOLERANCE`` of what ``greedy``
    reaches, or where no change relieves the busiest rank. With hosts and groups as ``greedy`` has them nothing leaves
    its host. Where ``current`` lacks experts there is nothing to keep, and the result is greedy's. Raises as it does.
    """
    loads = checked_load(load)
    wanted = greedy(loads, current, hosts=hosts, groups=groups)
    if not holders(current, len(loads)).any(axis=0).all():
        return wanted
    target = balancedness(loads, wanted) - TOLERANCE
    hosts_of = np.array(host_of(len(current), hosts if groups > 1 else 1))
    found = current
    for _ in range(sum(len(own) for own in current)):
        changed = None if balancedness(loads, found) >= target else _relieved(loads, found, hosts_of)
        if changed is None:
            break
        found = changed
    found = aligned(current, [{expert for expert in own if expert != -1} for own in found])
    return found if balancedness(loads, found) > balancedness(loads, current) else current


def _relieved(loads: NDArray[np.float64], slots: Slots, hosts_of: NDArray[np.int64]) -> Slots | None:
    """Return ``slots`` after the change that relieves the busiest rank most for each expert moved, if there is one."""
    held = holders(slots, len(loads))
    busy = int(rank_loads(loads, slots).argmax())
    near = [rank for rank in np.flatnonzero(hosts_of == hosts_of[busy]).tolist() if rank != busy]
    places = [(rank, slot) for rank in near for slot in range(len(slots[rank]))]
    own = np.flatnonzero(held[busy])
    if not places or not own.size:
        return None
    at = _Changes(
        loads=loads,
        held=held,
        busy=busy,
        own=own,
        rank=np.array([rank for rank, _ in places]),
        there=np.array([slots[rank][slot] for rank, slot in places]),
    )
    level = float(rank_loads(loads, slots)[busy])
    gain = level - np.stack([at.copied(), at.swapped(), at.spread(room=-1 in slots[busy])])
    gain[gain <= _PAYS * level] = -np.inf
    gain[1:, :, at.there >= 0] /= 2  # two experts move
    kind, one, place = np.unravel_index(gain.argmax(), gain.shape)
    if not np.isfinite(gain[kind, one, place]):
        return None
    expert, (to, slot) = int(own[one]), places[place]
    made = [list(ids) for ids in slots]
    made[to][slot] = expert
    if kind:
        made[busy][made[busy].index(expert if kind == 1 else -1)] = int(at.there[place])
    return tuple(map(tuple, made))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Changes:
    """What would become of each expert of the busiest rank and each slot of others.

    held: ``[W, E]``. own: experts of rank ``busy``. rank, there: of each slot its rank and expert, -1 for none. Methods
    return ``[own, slots]``: the load of the busiest rank that feels the change, infinite where it is not allowed.
    """

    loads: NDArray[np.float64]
    held: NDArray[np.bool_]
    busy: int
    own: NDArray[np.int64]
    rank: NDArray[np.int64]
    there: NDArray[np.int64]

    @property
    def copies(self) -> NDArray[np.int64]:
        return self.held.sum(axis=0)

    def level(self) -> NDArray[np.float64]:
        return self.held @ (self.loads / self.copies)

    def weight(self, ids: NDArray[np.int64], more: int = 0) -> NDArray[np.float64]:
        """Return the load of one copy of each expert if it had as many more; 0 for no expert."""
        return np.where(ids < 0, 0.0, self.loads[ids] / np.maximum(self.copies[ids] + more, 1))

    def swapped(self) -> NDArray[np.float64]:
        """An expert changes places with a slot's, which may be empty."""
        allowed = (self.there < 0) | ~self.held[self.busy, self.there]
        return self._exchanged(self.weight(self.own), self.weight(self.own), allowed)

    def spread(self, *, room: bool) -> NDArray[np.float64]:
        """A copy takes the place of a slot's expert, which goes to an empty slot of the busiest rank."""
        allowed = (self.there >= 0) & ~self.held[self.busy, self.there] & room
        shared = self.weight(self.own, 1)
        return self._exchanged(self.weight(self.own) - shared, shared, allowed)

    def _exchanged(
        self, goes: NDArray[np.float64], arrives: NDArray[np.float64], allowed: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        comes, level = self.weight(self.there), self.level()
        peak = np.maximum(level[self.busy] - goes[:, None] + comes, level[self.rank] + arrives[:, None] - comes)
        return np.where(self._absent() & allowed, peak, np.inf)

    def copied(self) -> NDArray[np.float64]:
        """A copy goes to an empty slot, or over a copy that is not the last."""
        allowed = (self.there < 0) | (self.copies[self.there] > 1)
        more, fewer = self.weight(self.own, 1), self.weight(self.there, -1)
        has_own, has_there = self.held[:, self.own], self.held[:, self.there] & (self.there >= 0)
        change = (has_own * (more - self.weight(self.own)))[:, :, None]
        change = change + (has_there * (fewer - self.weight(self.there)))[:, None, :]
        feels = has_own[:, :, None] | has_there[:, None, :]
        at = np.arange(len(self.rank))
        # The slot's own rank loses its copy, and so takes on nothing of what the others share.
        change[self.rank, :, at] += more[None, :] - fewer[:, None]
        feels[self.rank, :, at] = True
        peak = np.where(feels, self.level()[:, None, None] + change, -np.inf).max(axis=0)
        return np.where(self._absent() & allowed, peak, np.inf)

    def _absent(self) -> NDArray[np.bool_]:
        return ~self.held[self.rank][:, self.own].T
