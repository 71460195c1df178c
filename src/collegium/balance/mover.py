"""Packed experts from rank to rank while the layers serve: which can move when, and how the bytes travel.

An expert is copied into a slot that is empty, so whatever serves goes on serving; only when the copy has the checksum
that was taken when the expert was packed may a map name it. Nothing is staged: bytes go from slot to slot, and the
weights of a rank never take more memory than its slots.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import distributed

from ..errors import InputError, RankError
from ..parallel.groups import group_named
from ..parallel.rendezvous import timeout_seconds
from .checksum import checksum
from .slots import Move, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from ..experts import PackedWeights
    from ..parallel.rendezvous import Rendezvous

__all__ = ["Arrived", "Mover", "Round", "rounds"]

_Made = TypeVar("_Made")
_CTAS = 8  # multiprocessors that messages may take
# Groups of movers that were closed with nothing on its way, by default group, members, device and bound of a wait.
# They are taken again: torch names a group by its members, and under the name of one that was destroyed finds addresses
# where nobody listens.
_free: dict[tuple[Any, ...], set[str]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Copies that can be made at the same time, and what the slots of all ranks hold once they are there."""

    moves: tuple[Move, ...]
    slots: Slots


def rounds(current: Slots, wanted: Slots, room: Sequence[int]) -> tuple[Round, ...]:
    """Return what makes every rank hold what it has in ``wanted``, in whatever slots, out of ``current``.

    room: slots of each rank; entries of ``current`` beyond are no slots. Every expert has a place at every moment. One
    empty slot on every rank, before and after, is always enough. Raises InputError where slots are missing.
    """
    targets = [set(own) - {-1} for own in wanted]
    held = [[*own] for own in current]
    homeless = set[int]().union(*targets) ^ (set[int]().union(*map(set, current)) - {-1})
    full = [rank for rank, (own, most) in enumerate(zip(targets, room, strict=False)) if len(own) > most]
    if len(targets) != len(held) or homeless or full:
        raise InputError(
            f"moving experts: asked for {[sorted(own) for own in targets]} in {list(room)} slots of {len(held)} ranks; "
            f"needed are as many ranks, slots enough, and the experts there are; wrong are {sorted(homeless) or full}"
        )
    made: list[Round] = []
    while True:
        moves = _possible(held, targets, room)
        for move in moves:
            held[move.rank][move.slot] = move.expert
        if not _dropped(held, targets) and not moves:
            break
        made.append(Round(moves=moves, slots=tuple(map(tuple, held))))
    late = [rank for rank, own in enumerate(targets) if not own.issubset(held[rank])]
    if late:
        missing = sorted(targets[late[0]].difference(held[late[0]]))
        raise InputError(
            f"moving experts: rank {late[0]} has no empty slot for experts {missing}; leave "
            "one slot of every rank empty (Placement.spare), before and after"
        )
    return tuple(made)


def _possible(held: list[list[int]], targets: list[set[int]], room: Sequence[int]) -> tuple[Move, ...]:
    """Return copies into slots empty now; experts that leave a rank go first, since that empties a slot."""
    where: dict[int, list[tuple[int, int]]] = {}
    for rank, own in enumerate(held):
        for slot, expert in enumerate(own):
            if expert != -1:
                where.setdefault(expert, []).append((rank, slot))

    def stays(place: tuple[int, int]) -> bool:
        return held[place[0]][place[1]] in targets[place[0]]

    moves: list[Move] = []
    for rank, own in enumerate(held):
        empty = [slot for slot, expert in enumerate(own[: room[rank]]) if expert == -1]
        missing = [(min(map(stays, where[expert])), expert) for expert in targets[rank].difference(own)]
        for slot, (_, expert) in zip(empty, sorted(missing), strict=False):
            source = min(where[expert], key=lambda place: (stays(place), (place[0] - rank) % len(held)))
            moves.append(Move(expert=expert, source_rank=source[0], source_slot=source[1], rank=rank, slot=slot))
    return tuple(moves)


def _dropped(held: list[list[int]], targets: list[set[int]]) -> bool:
    """Empty slots of experts that have a place where they are to be; return whether there were any."""
    settled = {expert for own, target in zip(held, targets, strict=True) for expert in own if expert in target}
    found = False
    for own, target in zip(held, targets, strict=True):
        for slot, expert in enumerate(own):
            if expert in settled and expert not in target:
                own[slot], found = -1, True
    return found


class Arrived(NamedTuple):
    """What a round came to on this rank. good: all that arrived has its checksum. tables: of the map, on the device.

    ready: the event after which they are there, None on a CPU.
    """

    good: bool
    tables: tuple[Tensor, Tensor]
    ready: Any


class Mover:
    """Carries this rank's part of one round at a time, in a thread and on a stream of its own.

    meeting: of those that split the experts; all of them make their movers at the same time.
    damage: called with what has arrived before its checksum is taken; tests damage a move with it.
    """

    def __init__(self, meeting: Rendezvous, device: torch.device) -> None:
        """Take a process group of its own, so that moves never stand in the way of the layers' exchanges."""
        self.ranks, self.rank = meeting.ranks, meeting.rank
        bound = timedelta(seconds=max(timeout_seconds(), 1.0))
        self._key = weakref.ref(group_named("")), self.ranks, device.type, bound
        for old in [old for old in _free if old[0] != self._key[0]]:
            del _free[old]
        own = _free.setdefault(self._key, set())
        common = set[str].intersection(*meeting.exchange(own, "groups of closed movers"))
        self._group, self._under_way = min(common, default=""), 0
        own.discard(self._group)
        if not self._group:
            made: Any = distributed.new_group(
                list(self.ranks), timeout=bound, use_local_synchronization=True, pg_options=_options(device, bound)
            )
            self._group = made.group_name
        self._thread = ThreadPoolExecutor(1, "collegium-mover")
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.damage: Callable[[tuple[Tensor, ...]], None] | None = None
        if self._side is not None:
            self._thread.submit(self._connect, device).result()

    def start(
        self, packed: PackedWeights, moves: Sequence[Move], sums: Tensor, tables: Callable[[], tuple[Tensor, Tensor]]
    ) -> Future[Arrived]:
        """Begin to send and receive, and to bring ``tables()`` to the device; sums: ``[E, 2]``, of logical experts.

        Whatever the current stream was given before is done with the slots that are written.
        """
        free = None if self._side is None else torch.cuda.current_stream(self._side.device).record_event()
        self._under_way += 1
        return self._thread.submit(self._carry, free, packed, tuple(moves), sums, tables)

    def aside(self, work: Callable[..., _Made], *args: Any) -> Future[_Made]:
        """Begin work of the host in the thread that moves."""
        return self._thread.submit(work, *args)

    def close(self) -> None:
        """End the thread; leave the process group to the next mover of these ranks, unless a message may be in it."""
        self._thread.shutdown(cancel_futures=True)
        if not self._under_way and self._key in _free:
            _free[self._key].add(self._group)
            self._under_way = 1  # closing again must not give away what another mover has taken

    def _on_side(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def _connect(self, device: torch.device) -> None:
        """Let NCCL connect every pair now, which blocks, and not at the first move."""
        flag = torch.zeros(1, dtype=torch.uint8, device=device)
        others = [place for place in range(len(self.ranks)) if place != self.rank]
        with self._on_side():
            ops = [self._message(send, flag, place, 0) for place in others for send in (True, False)]
            self._wait(ops, "connecting the movers")

    def _carry(
        self,
        free: Any,
        packed: PackedWeights,
        moves: tuple[Move, ...],
        sums: Tensor,
        tables: Callable[[], tuple[Tensor, Tensor]],
    ) -> Arrived:
        with torch.inference_mode(), self._on_side():
            if self._side is not None:
                self._side.wait_event(free)
            ops: list[distributed.P2POp] = []
            arrived: list[tuple[Move, tuple[Tensor, ...], list[Tensor]]] = []
            for number, move in enumerate(moves):
                send, receive = move.source_rank == self.rank, move.rank == self.rank
                if not (send or receive):
                    continue
                parts = packed.take(move.source_slot if send else move.slot)
                raw = [_raw(part) for part in parts]
                other = move.rank if send else move.source_rank
                ops += [self._message(send, own, other, number * len(raw) + i) for i, own in enumerate(raw)]
                if receive:
                    arrived.append((move, parts, raw))
            self._wait(ops, "moving experts")
            good = [self._settled(move, parts, raw, sums) for move, parts, raw in arrived]
            made = tables()
            there = made[0].to(sums.device), made[1].to(sums.device)
            ready = None if self._side is None else self._side.record_event()
            self._under_way -= 1
            return Arrived(not good or bool(torch.stack(good).all().item()), there, ready)

    def _settled(self, move: Move, parts: tuple[Tensor, ...], raw: list[Tensor], sums: Tensor) -> Tensor:
        for part, own in zip(parts, raw, strict=True):
            if not part.is_contiguous():
                part.copy_(own.view(part.dtype).view(part.shape))
        if self.damage is not None:
            self.damage(parts)
        return (checksum(parts) == sums[move.expert]).all()

    def _message(self, send: bool, raw: Tensor, place: int, tag: int) -> distributed.P2POp:
        op = distributed.isend if send else distributed.irecv
        return distributed.P2POp(op, raw, self.ranks[place], group_named(self._group), tag)

    def _wait(self, ops: list[distributed.P2POp], phase: str) -> None:
        """Do ``ops``; raises RankError where that takes longer than ``timeout_seconds()``, or another rank is gone."""
        if not ops:
            return
        try:
            works, started = distributed.batch_isend_irecv(ops), time.monotonic()
            for work in works:
                work.wait(timedelta(seconds=timeout_seconds())) if self._side is None else work.wait()
            done = None if self._side is None else self._side.record_event()
            while done is not None and not done.query():
                if time.monotonic() - started > timeout_seconds():
                    raise RuntimeError(f"nothing came within {timeout_seconds():g} s")  # noqa: TRY301 - one handler
                time.sleep(0.001)
        except RuntimeError as error:  # torch raises nothing narrower
            others = tuple(sorted({op.peer for op in ops}))
            raise RankError(f"{phase}, with rank {others}: {error}", ranks=others, phase=phase) from error


def _options(device: torch.device, bound: timedelta) -> Any:
    """Let NCCL take few multiprocessors: its kernels wait for another rank's, and what serves needs the rest."""
    if device.type != "cuda":
        return None
    made: Any = getattr(distributed, "ProcessGroupNCCL").Options()  # noqa: B009 - not there in torch for CPUs
    made.config.max_ctas, made._timeout = _CTAS, bound
    return made


def _raw(part: Tensor) -> Tensor:
    """Return the bytes of ``part``: its own memory where it is contiguous, which messages can be written to."""
    return part.contiguous().reshape(-1).view(torch.uint8)
