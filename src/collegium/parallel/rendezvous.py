"""Small values that ranks tell each other on the host, with a bound on every wait.

Through torch's store, not through a collective: a rank that does not come is named, the others go on, and nothing is
queued on a device, so ranks can also meet while a CUDA graph is captured.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from torch import distributed

from ..errors import InputError, RankError
from .groups import group_named, world_ranks
from .liveness import Endpoint, is_dead, local_endpoint

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["LOOK", "Rendezvous", "group_lock", "is_known_to_all", "known_to_all", "rendezvous_of", "timeout_seconds"]

LOOK = 0.5  # seconds between looks whether those who are waited for still live
_KEPT = 2  # meetings whose values stay in the store: a rank that is late may still read the one before
_LONGEST = 10**9  # seconds; torch counts waits in 64 bits of nanoseconds
_seconds = 10.0
_made: dict[str, tuple[weakref.ref[distributed.ProcessGroup], Rendezvous]] = {}
_lock = threading.Lock()
_turns: dict[str, threading.RLock] = {}


def timeout_seconds(seconds: float | None = None) -> float:
    """Return how long a rank waits for another one; ``seconds`` sets it.

    Raises InputError unless it is positive and finite.
    """
    global _seconds
    if seconds is not None:
        _seconds = _checked(seconds)
    return _seconds


class Rendezvous:
    """The ranks of one process group, who exchange values in the order of their calls.

    Every rank makes the same calls; ``phase`` is compared, so a rank that is somewhere else is found and named. After a
    RankError the ranks no longer agree on how often they met: make a new group of those that are left.
    built: how many layers were built over the group, as whoever builds one counts.
    """

    def __init__(self, group: str = "") -> None:
        """Meet the ranks of the process group ``group``, of torch's default one for an empty name."""
        own = group_named(group)
        self.ranks = world_ranks(group)
        self.rank, self.size = distributed.get_rank(own), distributed.get_world_size(own)
        # Held, so that no other store is ever taken for it.
        self.store: Any = distributed.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        named = f"collegium/{group}/{'.'.join(map(str, self.ranks))}"
        # A group made again over the same store would otherwise read what the one before left there.
        self._prefix = f"{named}/{self.store.add(f'{named}/made by {self.rank}', 1)}"
        self._count = self.built = 0
        self._doors: tuple[Endpoint, ...] = ()
        self._turn = threading.RLock()

    def exchange(self, value: Any, phase: str) -> list[Any]:
        """Return what every rank gave, in the order of ranks. value: whatever pickle takes; phase: what it is for.

        Raises RankError where a rank does not come within ``timeout_seconds()``, or comes for something else.
        """
        with self._turn:
            return self.wait(self.post(value, phase), phase)

    def post(self, value: Any, phase: str) -> int:
        """Come to the next meeting without waiting for others; ``collect`` takes the number returned, before the next.

        Raises RankError where the store that ranks meet in is gone.
        """
        with self._turn:
            number, self._count = self._count, self._count + 1
            said = pickle.dumps((phase, value, local_endpoint() if number == 0 else None))
            try:
                self.store.set(self._key(number, self.rank), said)
            except RuntimeError as error:
                raise self._lost(phase, self._without_store()) from error
            return number

    def wait(self, number: int, phase: str) -> list[Any]:
        """Return what every rank gave to meeting ``number``; errors as ``exchange``."""
        found = self._values(number, phase)
        if number >= _KEPT:
            # Whoever came to this meeting has read the one before it. If the store's host ended since, the next tells.
            with suppress(RuntimeError):
                self.store.delete_key(self._key(number - _KEPT, self.rank))
        said = [pickle.loads(each) for each in found]
        if number == 0:
            self._doors = tuple(door for _, _, door in said)
        others = tuple(rank for rank, (there, *_) in zip(self.ranks, said, strict=True) if there != phase)
        if others:
            where = said[self.ranks.index(others[0])][0]
            raise RankError(
                f"rank {_listed(others)} is at {where!r} while this rank is at {phase!r}: every rank makes the same "
                "calls in the same order",
                ranks=others,
                phase=phase,
            )
        return [own for _, own, _ in said]

    def dead_ranks(self) -> tuple[int, ...]:
        """Return the places of those whose process has ended, as far as that is known."""
        return tuple(place for place, door in enumerate(self._doors) if place != self.rank and is_dead(door))

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where each rank's process listens; empty before the first meeting."""
        return self._doors

    def build(self, value: Any, phase: str) -> int:
        """Return the number of a layer that all ranks build together, the first one's being 1; errors as ``agree``."""
        self.agree(value, phase)
        self.built += 1
        return self.built

    def agree(self, value: Any, phase: str) -> None:
        """Raise InputError on every rank unless all ranks give the same ``value``; of a dict it names what differs."""
        found = self.exchange(value, phase)
        other = next((place for place, own in enumerate(found) if own != found[0]), None)
        if other is not None:
            one, two = found[0], found[other]
            said = f"{one} and {two}"
            if isinstance(value, dict):
                names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
                said = "; ".join(f"{name} {one.get(name)} and {two.get(name)}" for name in names)
            text = (
                f"{phase}: ranks {self.ranks[0]} and {self.ranks[other]} differ: {said}; every rank has to ask for the "
                "same"
            )
            raise known_to_all(InputError(text))

    def _values(self, number: int, phase: str) -> list[bytes]:
        store, keys = self.store, [self._key(number, rank) for rank in range(self.size)]
        started = time.monotonic()
        missing = tuple(rank for rank, key in enumerate(keys) if not self._came(key, started, phase))
        if missing:
            raise self._lost(phase, missing)
        try:
            return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        except RuntimeError as error:
            raise self._lost(phase, self._without_store()) from error

    def _without_store(self) -> tuple[int, ...]:
        """Return the places of those who ended with the store, of all ranks where nobody can be said to have."""
        until = time.monotonic() + LOOK
        # The store's connection may break a moment before its host's door does.
        while not (ended := self.dead_ranks()) and time.monotonic() < until:
            time.sleep(0.01)
        return ended or tuple(range(self.size))

    def _came(self, key: str, started: float, phase: str) -> bool:
        """Return whether ``key`` is there in time; raise for a rank that is known to have ended meanwhile."""
        until, looked, pause = started + timeout_seconds(), time.monotonic(), 1e-4
        # Looks, and no wait of the store: torch prints a warning for each wait that ends in vain.
        while True:
            with suppress(RuntimeError):
                if self.store.check([key]):
                    return True
            now = time.monotonic()
            if now - looked > LOOK:
                looked, ended = now, self.dead_ranks()
                if ended:
                    raise self._lost(phase, ended)
            if now > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _lost(self, phase: str, missing: tuple[int, ...]) -> RankError:
        ranks = tuple(self.ranks[place] for place in missing)
        return RankError(
            f"rank {_listed(ranks)} did not come to {phase!r} within {timeout_seconds():g} s; it ended, hangs or makes "
            "other calls. The ranks that are left may plan anew without it (collegium.balance.elastic)",
            ranks=ranks,
            phase=phase,
        )

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


def rendezvous_of(group: str = "") -> Rendezvous:
    """Return the one meeting of the process group ``group`` in this process."""
    own = group_named(group)
    with _lock:
        # A group that was destroyed and made again may have the same name, the same address and the same store.
        made, found = _made.get(group, (None, None))
        if made is None or found is None or made() is not own:
            found = Rendezvous(group)
            _made[group] = weakref.ref(own), found
        return found


def known_to_all(error: Exception) -> Exception:
    """Return ``error``, marked as one that every rank raises or hears of, so that the ranks stay in step."""
    error.__dict__["known_to_all"] = True
    return error


def is_known_to_all(error: Exception) -> bool:
    """Return whether every rank raises or hears of ``error``."""
    return isinstance(error, RankError) or "known_to_all" in vars(error)


def group_lock(groups: tuple[str, ...]) -> AbstractContextManager[None]:
    """Let one thread of this process at a time pass tokens over the process ``groups``; one rank waits for nobody.

    A pass is several exchanges, which the other ranks would pair with those of another thread's pass.
    """
    return _group_lock(groups) if groups else nullcontext()


@contextmanager
def _group_lock(groups: tuple[str, ...]) -> Generator[None]:
    with ExitStack() as held:
        for name in sorted(groups):
            held.enter_context(_turns.setdefault(name, threading.RLock()))
        yield


def _checked(seconds: object) -> float:
    if not isinstance(seconds, int | float) or not 0 < seconds < _LONGEST:
        raise InputError(
            f"timeout_seconds: found {seconds!r}, allowed: a positive number of seconds, below {_LONGEST:,}"
        )
    return float(seconds)


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
