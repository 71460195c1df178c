"""One change of a placement that relieves the busiest rank: what both policies are refined with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .slots import holders, rank_loads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .slots import Slots

__all__ = ["best_swap"]

_PAYS = 1e-9  # of the busiest rank's load; less is rounding


def best_swap(loads: NDArray[np.float64], slots: Slots, hosts_of: NDArray[np.int64]) -> Slots | None:
    """Return ``slots`` after the change that relieves the busiest rank most for each expert moved, if there is one.

    hosts_of: the host of every rank; nothing leaves its own. Every rank that feels the change has less than the busiest
    had, so the most loaded ranks get fewer or lighter with each one, and a chain of them ends.
    """
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
    gain = level - np.stack([at.copied(), at.swapped(), at.spread(room=-1 in slots[busy]), at.dropped()])
    gain[gain <= _PAYS * level] = -np.inf
    gain[1:3, :, at.there >= 0] /= 2  # two experts move
    kind, one, place = np.unravel_index(gain.argmax(), gain.shape)
    if not np.isfinite(gain[kind, one, place]):
        return None
    expert, (to, slot) = int(own[one]), places[place]
    made = [list(ids) for ids in slots]
    left = made[busy].index(-1 if kind == 2 else expert)
    if kind == 3:
        made[busy][left] = -1
        return tuple(map(tuple, made))
    made[to][slot] = expert
    if kind:
        made[busy][left] = int(at.there[place])
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

    def dropped(self) -> NDArray[np.float64]:
        """A copy that is not the last is given up; the same for every slot."""
        more = self.weight(self.own, -1) - self.weight(self.own)
        feels = self.held[:, self.own]
        feels[self.busy] = False
        peak = np.where(feels, self.level()[:, None] + more, -np.inf).max(axis=0)
        peak = np.maximum(peak, self.level()[self.busy] - self.weight(self.own))
        return np.where(self.copies[self.own] > 1, peak, np.inf)[:, None].repeat(len(self.there), axis=1)

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
