"""Move packed experts between ranks while the layers serve: which can move when, and how the bytes travel.

An expert is copied into an empty slot, so serving is not disturbed; a map may refer to the copy only after its checksum
matches the one computed when the expert was packed. Nothing is staged: bytes go from slot to slot, so a rank never
needs more memory for weights than its slots.
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
    from ..parallel.expert_map import MapTables
    from ..parallel.rendezvous import Rendezvous

__all__ = ["MoveResult", "Mover", "Round", "rounds"]

_Result = TypeVar("_Result")
_MAX_CTAS = 8  # multiprocessors that messages may occupy
# Process groups of closed movers without messages under way, by default group, members, device and timeout. They are
# reused: torch names a group by its members, and a new group with the name of a destroyed one finds stale addresses.
_free_groups: dict[tuple[Any, ...], set[str]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Copies that can be made at the same time, and the contents of all ranks' slots afterwards."""

    moves: tuple[Move, ...]
    slots: Slots


def rounds(current: Slots, target: Slots, slot_counts: Sequence[int]) -> tuple[Round, ...]:
    """Return the rounds that bring the experts of ``target`` to each rank, in any slots, starting from ``current``.

    slot_counts: slots of each rank; entries of ``current`` beyond are not slots. Every expert has a slot at any time.
    One empty slot on every rank, before and after, is always enough. Raises InputError where slots are missing.
    """
    targets = [set(slots) - {-1} for slots in target]
    slots = [[*rank_slots] for rank_slots in current]
    present = set[int]().union(*map(set, current)) - {-1}
    mismatch = set[int]().union(*targets) ^ present
    full = [rank for rank, (ids, count) in enumerate(zip(targets, slot_counts, strict=False)) if len(ids) > count]
    if len(targets) != len(slots) or mismatch or full:
        raise InputError(
            f"moving experts: requested {[sorted(ids) for ids in targets]} in {list(slot_counts)} slots of "
            f"{len(slots)} ranks; needed are as many ranks, slots enough, and the existing experts; wrong are "
            f"{sorted(mismatch) or full}"
        )
    result: list[Round] = []
    while True:
        moves = _possible_moves(slots, targets, slot_counts)
        for move in moves:
            slots[move.rank][move.slot] = move.expert
        dropped = _drop_moved(slots, targets)
        if not dropped and not moves:
            break
        result.append(Round(moves=moves, slots=tuple(map(tuple, slots))))
    unfinished = [rank for rank, ids in enumerate(targets) if not ids.issubset(slots[rank])]
    if unfinished:
        rank = unfinished[0]
        missing = sorted(targets[rank].difference(slots[rank]))
        raise InputError(
            f"moving experts: rank {rank} has no empty slot for experts {missing}; leave one slot of every rank empty "
            "(Placement.spare), before and after"
        )
    return tuple(result)


class _Location(NamedTuple):
    rank: int
    slot: int


def _possible_moves(slots: list[list[int]], targets: list[set[int]], slot_counts: Sequence[int]) -> tuple[Move, ...]:
    """Return copies into slots that are empty now; experts that leave a rank go first, since that empties a slot."""
    locations: dict[int, list[_Location]] = {}
    for rank, rank_slots in enumerate(slots):
        for slot, expert in enumerate(rank_slots):
            if expert != -1:
                locations.setdefault(expert, []).append(_Location(rank, slot))

    def stays(location: _Location) -> bool:
        return slots[location.rank][location.slot] in targets[location.rank]

    moves: list[Move] = []
    for rank, rank_slots in enumerate(slots):
        empty = [slot for slot, expert in enumerate(rank_slots[: slot_counts[rank]]) if expert == -1]
        missing = [(min(map(stays, locations[expert])), expert) for expert in targets[rank].difference(rank_slots)]
        for slot, (_, expert) in zip(empty, sorted(missing), strict=False):
            source = _nearest_source(locations[expert], rank, len(slots), stays)
            moves.append(Move(expert=expert, source_rank=source.rank, source_slot=source.slot, rank=rank, slot=slot))
    return tuple(moves)


def _nearest_source(locations: list[_Location], rank: int, ranks: int, stays: Callable[[_Location], bool]) -> _Location:
    """Return where to copy an expert from for ``rank``: a slot that it leaves if possible, of the next rank."""
    return min(locations, key=lambda location: (stays(location), (location.rank - rank) % ranks))


def _drop_moved(slots: list[list[int]], targets: list[set[int]]) -> bool:
    """Empty slots of experts that have reached a target elsewhere; return whether any was emptied."""
    settled = {
        expert for rank_slots, target in zip(slots, targets, strict=True) for expert in rank_slots if expert in target
    }
    dropped = False
    for rank_slots, target in zip(slots, targets, strict=True):
        for slot, expert in enumerate(rank_slots):
            if expert in settled and expert not in target:
                rank_slots[slot] = -1
                dropped = True
    return dropped


class MoveResult(NamedTuple):
    """The result of a round on this rank.

    ok: every expert that arrived has its checksum. tables: of the map, on the device. ready: the event after which they
    are complete, None on a CPU.
    """

    ok: bool
    tables: MapTables
    ready: Any


class _Arrival(NamedTuple):
    """An expert that arrives: its slot's tensors, and the bytes that messages are written to."""

    move: Move
    parts: tuple[Tensor, ...]
    raw: list[Tensor]


class Mover:
    """Carries out this rank's part of one round at a time, in a thread and on a separate CUDA stream.

    rendezvous: of the ranks that split the experts; all of them create their movers together.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Use a separate process group, so that moves never delay the layers' exchanges."""
        self.ranks = rendezvous.ranks
        self.rank = rendezvous.rank
        timeout = timedelta(seconds=max(timeout_seconds(), 1.0))
        self._key = weakref.ref(group_named("")), self.ranks, device.type, timeout
        for stale in [key for key in _free_groups if key[0] != self._key[0]]:
            del _free_groups[stale]
        free = _free_groups.setdefault(self._key, set())
        common = set[str].intersection(*rendezvous.exchange(free, "groups of closed movers"))
        self._group = min(common, default="")
        self._under_way = 0
        free.discard(self._group)
        if not self._group:
            group: Any = distributed.new_group(
                list(self.ranks),
                timeout=timeout,
                use_local_synchronization=True,
                pg_options=_nccl_options(device, timeout),
            )
            self._group = group.group_name
        self._thread = ThreadPoolExecutor(1, "collegium-mover")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._thread.submit(self._connect, device).result()

    def start(
        self, packed: PackedWeights, moves: Sequence[Move], checksums: Tensor, tables: Callable[[], MapTables]
    ) -> Future[MoveResult]:
        """Begin to send and receive, and to copy ``tables()`` to the device. checksums: ``[E, 2]``, of logical experts.

        The slots that are written are no longer used by anything after what is now queued on the current stream.
        """
        slots_free = None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()
        self._under_way += 1
        return self._thread.submit(self._run_round, slots_free, packed, tuple(moves), checksums, tables)

    def submit(self, work: Callable[..., _Result], *args: Any) -> Future[_Result]:
        """Begin work of the host in the thread that moves."""
        return self._thread.submit(work, *args)

    def close(self) -> None:
        """End the thread; offer the process group to the next mover of these ranks unless messages may be under way."""
        self._thread.shutdown(cancel_futures=True)
        if not self._under_way and self._key in _free_groups:
            _free_groups[self._key].add(self._group)
            self._under_way = 1  # a second close() must not offer a group that another mover uses

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _connect(self, device: torch.device) -> None:
        """Let NCCL connect every pair now, since that blocks, instead of at the first move."""
        flag = torch.zeros(1, dtype=torch.uint8, device=device)
        others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        with self._on_stream():
            ops = [self._message(send, flag, rank, 0) for rank in others for send in (True, False)]
            self._wait(ops, "connecting the movers")

    def _run_round(
        self,
        slots_free: Any,
        packed: PackedWeights,
        moves: tuple[Move, ...],
        checksums: Tensor,
        tables: Callable[[], MapTables],
    ) -> MoveResult:
        with torch.inference_mode(), self._on_stream():
            if self._stream is not None:
                self._stream.wait_event(slots_free)
            arrivals = self._exchange(packed, moves)
            valid = [self._store(arrival, checksums[arrival.move.expert]) for arrival in arrivals]
            device_tables = tables().to(checksums.device)
            ready = None if self._stream is None else self._stream.record_event()
            self._under_way -= 1
            return MoveResult(not valid or bool(torch.stack(valid).all().item()), device_tables, ready)

    def _exchange(self, packed: PackedWeights, moves: tuple[Move, ...]) -> list[_Arrival]:
        """Send and receive the experts of ``moves``; return those that arrive here."""
        ops: list[distributed.P2POp] = []
        arrivals: list[_Arrival] = []
        for number, move in enumerate(moves):
            send = move.source_rank == self.rank
            receive = move.rank == self.rank
            if not (send or receive):
                continue
            parts = packed.take(move.source_slot if send else move.slot)
            raw = [_raw_bytes(part) for part in parts]
            peer = move.rank if send else move.source_rank
            ops += [self._message(send, part, peer, number * len(raw) + i) for i, part in enumerate(raw)]
            if receive:
                arrivals.append(_Arrival(move, parts, raw))
        self._wait(ops, "moving experts")
        return arrivals

    def _store(self, arrival: _Arrival, expected: Tensor) -> Tensor:
        """Copy received bytes to parts that are not contiguous; return whether the expert has the right checksum."""
        for part, raw in zip(arrival.parts, arrival.raw, strict=True):
            if not part.is_contiguous():
                part.copy_(raw.view(part.dtype).view(part.shape))
        return self._verify(arrival.parts, expected)

    def _verify(self, parts: tuple[Tensor, ...], expected: Tensor) -> Tensor:
        """Return, as a scalar bool on the device, whether an expert that arrived has the checksum ``expected``."""
        return (checksum(parts) == expected).all()

    def _message(self, send: bool, raw: Tensor, rank: int, tag: int) -> distributed.P2POp:
        op = distributed.isend if send else distributed.irecv
        return distributed.P2POp(op, raw, self.ranks[rank], group_named(self._group), tag)

    def _wait(self, ops: list[distributed.P2POp], phase: str) -> None:
        """Perform ``ops``; raise RankError after ``timeout_seconds()``, or if another rank is gone."""
        if not ops:
            return
        try:
            works = distributed.batch_isend_irecv(ops)
            started = time.monotonic()
            for work in works:
                work.wait(timedelta(seconds=timeout_seconds())) if self._stream is None else work.wait()
            done = None if self._stream is None else self._stream.record_event()
            while done is not None and not done.query():
                if time.monotonic() - started > timeout_seconds():
                    raise RuntimeError(f"nothing came within {timeout_seconds():g} s")  # noqa: TRY301 - one handler
                time.sleep(0.001)
        except RuntimeError as error:  # torch raises nothing narrower
            others = tuple(sorted({op.peer for op in ops}))
            raise RankError(f"{phase}, with rank {others}: {error}", ranks=others, phase=phase) from error


def _nccl_options(device: torch.device, timeout: timedelta) -> Any:
    """Limit NCCL to few multiprocessors: its kernels wait for other ranks, and serving needs the rest."""
    if device.type != "cuda":
        return None
    options: Any = getattr(distributed, "ProcessGroupNCCL").Options()  # noqa: B009 - missing in torch for CPUs
    options.config.max_ctas = _MAX_CTAS
    options._timeout = timeout
    return options


def _raw_bytes(part: Tensor) -> Tensor:
    """Return the bytes of ``part``: a view if it is contiguous, so that messages can be written to it."""
    return part.contiguous().reshape(-1).view(torch.uint8)
