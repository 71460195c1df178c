"""Small values that ranks tell each other on the host, with a bound on every wait.

Through torch's store, not through a collective: a rank that does not come is named, the others go on, and nothing is
queued on a device, so ranks can also meet while a CUDA graph is captured.
"""

from __future__ import annotations

import pickle
import threading
import time
from datetime import timedelta
from typing import Any

from torch import distributed

from ..errors import InputError, RankError
from .groups import group_named, world_ranks

__all__ = ["Meeting", "meeting_of", "timeout_seconds"]

_KEPT = 2  # meetings whose values stay in the store: a rank that is late may still read the one before
_seconds = 10.0
_made: dict[tuple[str, int], Meeting] = {}
_lock = threading.Lock()


def timeout_seconds(seconds: float | None = None) -> float:
    """Return how long a rank waits for another one; ``seconds`` sets it. Raises InputError unless it is positive."""
    global _seconds
    if seconds is not None:
        if not seconds > 0:
            raise InputError(f"timeout_seconds: found {seconds}, allowed: a positive number of seconds")
        _seconds = float(seconds)
    return _seconds


class Meeting:
    """The ranks of one process group, who exchange values in the order of their calls.

    Every rank makes the same calls; ``phase`` is compared, so a rank that is somewhere else is found and named. After a
    RankError the ranks no longer agree on how often they met: make a new group of those that are left.
    """

    def __init__(self, group: str = "") -> None:
        """Meet the ranks of the process group ``group``, of torch's default one for an empty name."""
        own = group_named(group)
        self.ranks = world_ranks(group)
        self.rank, self.size = distributed.get_rank(own), distributed.get_world_size(own)
        named = f"collegium/{group}/{'.'.join(map(str, self.ranks))}"
        # A group made again over the same store would otherwise read what the one before left there.
        self._prefix = f"{named}/{_store().add(f'{named}/made by {self.rank}', 1)}"
        self._count = 0
        self._turn = threading.Lock()

    def exchange(self, value: Any, phase: str) -> list[Any]:
        """Return what every rank gave, in the order of ranks. value: whatever pickle takes; phase: what it is for.

        Raises RankError where a rank does not come within ``timeout_seconds()``, or comes for something else.
        """
        with self._turn:
            number, self._count = self._count, self._count + 1
            found = self._values(number, pickle.dumps((phase, value)), phase)
            if number >= _KEPT:
                # Whoever came to this meeting has read the one before it.
                _store().delete_key(self._key(number - _KEPT, self.rank))
        said = [pickle.loads(each) for each in found]
        others = tuple(rank for rank, (there, _) in zip(self.ranks, said, strict=True) if there != phase)
        if others:
            where = said[self.ranks.index(others[0])][0]
            raise RankError(
                f"rank {_listed(others)} is at {where!r} while this rank is at {phase!r}: every rank makes the same "
                "calls in the same order",
                ranks=others,
                phase=phase,
            )
        return [own for _, own in said]

    def agree(self, value: Any, phase: str) -> None:
        """Raise InputError on every rank unless all ranks give the same ``value``."""
        found = self.exchange(value, phase)
        other = next((place for place, own in enumerate(found) if own != found[0]), None)
        if other is not None:
            raise InputError(
                f"{phase}: ranks {self.ranks[0]} and {self.ranks[other]} differ: {found[0]} and {found[other]}; every "
                "rank has to ask for the same"
            )

    def _values(self, number: int, own: bytes, phase: str) -> list[bytes]:
        store, keys = _store(), [self._key(number, rank) for rank in range(self.size)]
        started = time.monotonic()
        try:
            store.set(keys[self.rank], own)
        except RuntimeError as error:
            raise self._lost(phase, tuple(range(self.size))) from error
        missing: list[int] = []
        for rank, key in enumerate(keys):
            left = max(0.001, timeout_seconds() - (time.monotonic() - started))
            try:
                store.wait([key], timedelta(seconds=left))
            except RuntimeError:
                missing.append(rank)
        if missing:
            raise self._lost(phase, tuple(missing))
        return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]

    def _lost(self, phase: str, missing: tuple[int, ...]) -> RankError:
        ranks = tuple(self.ranks[place] for place in missing)
        return RankError(
            f"rank {_listed(ranks)} did not come to {phase!r} within {timeout_seconds():g} s; it ended, hangs or makes "
            "other calls. The ranks that are left may plan anew without it",
            ranks=ranks,
            phase=phase,
        )

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


def meeting_of(group: str = "") -> Meeting:
    """Return the one meeting of the process group ``group`` in this process."""
    own = group_named(group)
    with _lock:
        # A group that was destroyed and made again has the same name, and counts from the start.
        found = _made.get((group, id(own)))
        if found is None:
            for key in [key for key in _made if key[0] == group]:
                del _made[key]
            found = _made[group, id(own)] = Meeting(group)
        return found


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
