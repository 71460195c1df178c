"""Small values that ranks exchange on the host, with a timeout for every wait.

Through torch's store instead of a collective: a rank that does not respond is named, the others go on, and nothing is
queued on a device, so ranks can also exchange values while a CUDA graph is captured.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import distributed

from ..errors import InputError, RankError
from .groups import group_named, world_ranks
from .liveness import Endpoint, is_dead, local_endpoint

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = [
    "LOOK",
    "Rendezvous",
    "exchange_tables",
    "group_lock",
    "is_known_to_all",
    "known_to_all",
    "rendezvous_of",
    "timeout_seconds",
]

LOOK = 0.5  # seconds between checks whether the awaited processes are alive
_STORED_EXCHANGES = 2  # exchanges whose values stay in the store: a late rank may still read the previous one
_MAX_TIMEOUT = 10**9  # seconds; torch counts waits in 64 bits of nanoseconds
_timeout = 10.0


class _Message(NamedTuple):
    """What a rank stores for an exchange. endpoint: of its process, in the first exchange alone."""

    phase: str
    value: Any
    endpoint: Endpoint | None


def timeout_seconds(seconds: float | None = None) -> float:
    """Return how long a rank waits for another one, after setting it to ``seconds`` if given.

    Raises InputError unless it is positive and finite.
    """
    global _timeout
    if seconds is not None:
        _timeout = _check_timeout(seconds)
    return _timeout


def _check_timeout(seconds: object) -> float:
    if not isinstance(seconds, int | float) or not 0 < seconds < _MAX_TIMEOUT:
        raise InputError(
            f"timeout_seconds: found {seconds!r}, allowed: a positive number of seconds, below {_MAX_TIMEOUT:,}"
        )
    return float(seconds)


class Rendezvous:
    """Exchanges of values between the ranks of one process group, in the order of their calls.

    Every rank makes the same calls; ``phase`` is compared, so a rank that makes another call is detected and named.
    After a RankError the ranks no longer agree on the number of exchanges: create a new group of the remaining ranks.
    built: number of layers built over the group.
    """

    def __init__(self, group: str = "") -> None:
        """Use the process group ``group``, torch's default one for an empty name."""
        process_group = group_named(group)
        self.ranks = world_ranks(group)
        self.rank = distributed.get_rank(process_group)
        self.size = distributed.get_world_size(process_group)
        # A reference, so that no other store can get the same identity.
        self.store: Any = distributed.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        prefix = f"collegium/{group}/{'.'.join(map(str, self.ranks))}"
        # A counter: a group created again over the same store must not read values of the previous one.
        self._prefix = f"{prefix}/{self.store.add(f'{prefix}/made by {self.rank}', 1)}"
        self._count = 0
        self.built = 0
        self._endpoints: tuple[Endpoint, ...] = ()
        self._lock = threading.RLock()

    def exchange(self, value: Any, phase: str) -> list[Any]:
        """Return the values of all ranks, in the order of ranks. value: any picklable object; phase: its purpose.

        Raises RankError where a rank does not respond within ``timeout_seconds()``, or makes another call.
        """
        with self._lock:
            return self.wait(self.post(value, phase), phase)

    def post(self, value: Any, phase: str) -> int:
        """Store this rank's value for the next exchange without waiting; pass the returned number to ``wait``.

        ``wait`` has to be called before the next ``post``. Raises RankError where the store is gone.
        """
        with self._lock:
            number = self._count
            self._count += 1
            message = _Message(phase, value, local_endpoint() if number == 0 else None)
            try:
                self.store.set(self._key(number, self.rank), pickle.dumps(tuple(message)))
            except RuntimeError as error:
                raise self._lost(phase, self._ranks_without_store()) from error
            return number

    def wait(self, number: int, phase: str) -> list[Any]:
        """Return the values of all ranks in exchange ``number``; raises as ``exchange`` does."""
        stored = self._values(number, phase)
        if number >= _STORED_EXCHANGES:
            # All ranks that take part in this exchange have read the previous one. If the process that hosts the store
            # has ended since, the next exchange reports it.
            with suppress(RuntimeError):
                self.store.delete_key(self._key(number - _STORED_EXCHANGES, self.rank))
        messages = [_Message(*pickle.loads(raw)) for raw in stored]
        if number == 0:
            self._endpoints = tuple(message.endpoint for message in messages if message.endpoint is not None)
        elsewhere = [index for index, message in enumerate(messages) if message.phase != phase]
        if elsewhere:
            ranks = tuple(self.ranks[index] for index in elsewhere)
            raise RankError(
                f"rank {_join(ranks)} is at {messages[elsewhere[0]].phase!r} while this rank is at {phase!r}: every "
                "rank makes the same calls in the same order",
                ranks=ranks,
                phase=phase,
            )
        return [message.value for message in messages]

    def dead_ranks(self) -> tuple[int, ...]:
        """Return the group ranks whose process is known to have ended."""
        return tuple(
            index for index, endpoint in enumerate(self._endpoints) if index != self.rank and is_dead(endpoint)
        )

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where each rank's process listens; empty before the first exchange."""
        return self._endpoints

    def number_layer(self) -> int:
        """Return the number, from 1, of a layer that all ranks build together."""
        self.built += 1
        return self.built

    def agree(self, value: Any, phase: str) -> None:
        """Raise InputError on every rank unless all ranks have the same ``value``; for a dict it names the entries."""
        values = self.exchange(value, phase)
        other = next((index for index, entry in enumerate(values) if entry != values[0]), None)
        if other is None:
            return
        first, second = values[0], values[other]
        difference = f"{first} and {second}"
        if isinstance(value, dict):
            names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
            difference = "; ".join(f"{name} {first.get(name)} and {second.get(name)}" for name in names)
        text = (
            f"{phase}: ranks {self.ranks[0]} and {self.ranks[other]} differ: {difference}; every rank has to request "
            "the same"
        )
        raise known_to_all(InputError(text))

    def _values(self, number: int, phase: str) -> list[bytes]:
        keys = [self._key(number, rank) for rank in range(self.size)]
        started = time.monotonic()
        missing = tuple(rank for rank, key in enumerate(keys) if not self._wait_for_key(key, started, phase))
        if missing:
            raise self._lost(phase, missing)
        try:
            if self.store.has_extended_api():
                return self.store.multi_get(keys)
            return [self.store.get(key) for key in keys]
        except RuntimeError as error:
            raise self._lost(phase, self._ranks_without_store()) from error

    def _ranks_without_store(self) -> tuple[int, ...]:
        """Return the group ranks that ended together with the store, or all ranks if none is known to have ended."""
        deadline = time.monotonic() + LOOK
        # The connection to the store may break a moment before the port of its host process closes.
        while not (dead := self.dead_ranks()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return dead or tuple(range(self.size))

    def _wait_for_key(self, key: str, started: float, phase: str) -> bool:
        """Return whether ``key`` appears in time; raise RankError for a rank that ends meanwhile."""
        deadline = started + timeout_seconds()
        last_check = time.monotonic()
        pause = 1e-4
        # Polls instead of waiting in the store: torch prints a warning for each wait that times out.
        while True:
            with suppress(RuntimeError):
                if self.store.check([key]):
                    return True
            now = time.monotonic()
            if now - last_check > LOOK:
                last_check = now
                dead = self.dead_ranks()
                if dead:
                    raise self._lost(phase, dead)
            if now > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _lost(self, phase: str, missing: tuple[int, ...]) -> RankError:
        ranks = tuple(self.ranks[index] for index in missing)
        return RankError(
            f"rank {_join(ranks)} did not come to {phase!r} within {timeout_seconds():g} s; it ended, hangs or makes "
            "other calls. The ranks that are left may plan anew without it (collegium.balance.elastic)",
            ranks=ranks,
            phase=phase,
        )

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


# By name, with the process group that the rendezvous was made for.
_rendezvous: dict[str, tuple[weakref.ref[distributed.ProcessGroup], Rendezvous]] = {}
_rendezvous_lock = threading.Lock()


def rendezvous_of(group: str = "") -> Rendezvous:
    """Return the rendezvous of the process group ``group`` in this process."""
    process_group = group_named(group)
    with _rendezvous_lock:
        # A group that was destroyed and created again may have the same name, the same address and the same store.
        reference, rendezvous = _rendezvous.get(group, (None, None))
        if reference is None or rendezvous is None or reference() is not process_group:
            rendezvous = Rendezvous(group)
            _rendezvous[group] = weakref.ref(process_group), rendezvous
        return rendezvous


def known_to_all(error: Exception) -> Exception:
    """Return ``error``, marked as an error that every rank raises or learns of, so that the ranks stay in step."""
    error.__dict__["known_to_all"] = True
    return error


def is_known_to_all(error: Exception) -> bool:
    """Return whether every rank raises ``error`` or learns of it."""
    return isinstance(error, RankError) or "known_to_all" in vars(error)


_group_locks: dict[str, threading.RLock] = {}


def group_lock(groups: tuple[str, ...]) -> AbstractContextManager[None]:
    """Let one thread of this process at a time run passes over the process ``groups``; without groups do nothing.

    A pass is several exchanges, which the other ranks would match with those of another thread's pass.
    """
    return _group_lock(groups) if groups else nullcontext()


@contextmanager
def _group_lock(groups: tuple[str, ...]) -> Generator[None]:
    with ExitStack() as stack:
        for name in sorted(groups):
            stack.enter_context(_group_locks.setdefault(name, threading.RLock()))
        yield


def exchange_tables(entry: Any, groups: Sequence[tuple[str, str]], error: Exception | None = None) -> list[Any]:
    """Return the ``entry`` of every rank of several process groups, whose ranks call it together.

    groups: pairs of a phase and a process group; what one exchange brought goes into the next. error: why this rank
    cannot continue, raised here once the other ranks have its entry. Raises RankError where a rank does not respond.
    """
    if error is not None:
        known_to_all(error)
    table = [entry]
    try:
        with group_lock(tuple({group for _, group in groups})):
            for phase, group in groups:
                tables = rendezvous_of(group).exchange(table, phase)
                table = [row for rank_table in tables for row in rank_table]
    except RankError:
        if error is None:
            raise
    if error is not None:
        raise error
    return table


def _join(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
