"""The experts of a model's layers follow its load while it serves.

Between steps every rank calls ``Balancer.step``, equally often: the number of the call is the clock that all ranks
share. Every few calls they tell each other what is finished; what they were told at one such call they act on at the
next, all of them at the same one, so a map is switched everywhere between the same two steps and nobody waits.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InputError
from ..parallel.rendezvous import Rendezvous
from .checksum import agreed, checksum
from .mover import Arrived, Mover, Round, rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from numpy.typing import NDArray
    from torch import Tensor

    from ..layer import MoELayer
    from ..parallel.expert_map import ExpertMap
    from .metrics import Metrics
    from .slots import Slots

    Place = Callable[[NDArray[Any], Slots], Slots | None]

__all__ = ["Balancer", "Counts"]


@dataclass(kw_only=True, slots=True)
class Counts:
    """What was done so far. moved, moved_bytes: of experts that came to this rank. switched: maps of layers.

    given_up: rounds after which a checksum was wrong on some rank. stall: seconds that switches took on the serving
    stream (on a CPU, of its thread).
    """

    moved: int = 0
    moved_bytes: int = 0
    switched: int = 0
    given_up: int = 0
    stall: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """A layer's name, experts, map and checksums ``[E, 2]`` of logical experts; room: slots of each rank."""

    name: Any
    layer: MoELayer
    map: ExpertMap
    room: tuple[int, ...]
    sums: Tensor


class Balancer:
    """Rebalances ``layers``, split over the same ranks with at least one spare slot each; all ranks make it together.

    place: ``(load [E], slots) -> slots or None``, pure, for instance ``policy_named("greedy").place``: where experts
    should be, None for where they are. It is asked every ``interval`` calls, in a thread beside the steps, and never
    sees the last empty slot of a rank; what it raises ``step`` does, on every rank, and then nothing moves until it is
    asked again. Without it experts move only as ``plan`` says. every: calls between two beats while something is under
    way. metrics: told what came to this rank. counts: what was done. Raises InputError on every rank for layers that
    cannot move experts, and where ranks packed an expert into different bytes.
    """

    def __init__(
        self,
        layers: Mapping[Any, MoELayer],
        place: Place | None = None,
        *,
        interval: int = 1000,
        every: int = 4,
        metrics: Metrics | None = None,
    ) -> None:
        """Exchange checksums, and connect to the other ranks."""
        given: dict[str, object] = {"interval": interval, "every": every}
        for name, asked in given.items():
            if not isinstance(asked, int) or asked < 1:
                raise InputError(f"balancing: {name}={asked!r} was asked for; allowed: 1 call or more")
        first = _checked(layers)
        self.counts = Counts()
        self._place, self._interval, self._every, self._metrics = place, interval, every, metrics
        # Two: what loads() asks must not come between a note that was left and its reading.
        self._meeting, self._asking = Rendezvous(first.group), Rendezvous(first.group)
        self._layers = _with_sums(layers, self._meeting)
        self._mover = Mover(self._meeting, first.device)
        self._calls, self._next = 0, interval if place else 0
        self._given: tuple[int, str] | None = None
        self._closed = False
        self._queue: deque[tuple[_Layer, Round]] = deque()
        self._moving: Future[Arrived] | None = None
        self._placing: Future[list[tuple[_Layer, Round]]] | None = None
        self._seen = torch.zeros(len(self._layers), max(own.map.num_experts for own in self._layers), dtype=torch.int64)
        self._copied: _Copied | None = None
        self._stalls: list[tuple[Any, Any, _Layer, Round]] = []
        if place is not None:
            self.record()

    def record(self, on: bool = True) -> None:
        """Count the assignments of logical experts from the next call on, or stop; nothing waits for the device."""
        for own in self._layers:
            own.map.recording.fill_(int(on))

    def loads(self) -> Tensor:
        """Return ``[layers, E]`` int64: assignments counted so far on all ranks, which call this at the same time."""
        found = self._asking.exchange(self._copy_loads().read(), "summing loads")
        return torch.stack(found).sum(0)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._queue and self._given is None

    @property
    def stall(self) -> float:
        """Seconds that switches have taken on the serving stream so far; waits for those that still run."""
        self._measured(wait=True)
        return self.counts.stall

    def damage(self, how: Callable[[tuple[Tensor, ...]], None] | None) -> None:
        """Let ``how`` change what arrives here before it is checked: for tests of the check."""
        self._mover.damage = how

    def plan(self, wanted: Mapping[Any, Slots]) -> None:
        """Begin to make every rank hold what ``wanted`` says of a layer, by name; all ranks say so at the same call.

        Raises InputError, and begins nothing, for a layer or placement that cannot be, or a layer built anew since.
        """
        self._same()
        own = {layer.name: layer for layer in self._layers}
        unknown = [name for name in wanted if name not in own]
        if unknown or self._queue or self._placing is not None:
            raise InputError(
                f"balancing: asked to move layers {list(wanted)} with {len(self._queue)} rounds under way; allowed "
                f"are {list(own)}, when idle"
            )
        made = [each for name, slots in wanted.items() for each in _rounds(own[name], slots)]
        self._queue.extend(made)
        if made and self._given is None:
            self._next = self._calls + 1

    def step(self) -> None:
        """Do what is due between two steps; every rank calls it equally often, on the stream that serves.

        Raises RankError where another rank is gone or calls it at another time, InputError for a layer built anew.
        """
        self._calls += 1
        if self._calls != self._next:
            return
        self._same()
        self._measured()
        told, self._given, self._next = self._given, None, self._calls + self._every
        if told is not None:
            self._act(self._meeting.wait(*told))
        busy = self._queue or self._copied is not None or self._placing is not None
        if busy or (self._place and self._calls % self._interval < self._every):
            self._say()
        else:
            self._next = self._calls - self._calls % self._interval + self._interval if self._place else 0

    def close(self) -> None:
        """Stop moving; all ranks call it. Layers go on serving with the maps they have."""
        self._closed = True
        self._mover.close()

    def _same(self) -> None:
        """Refuse layers whose experts are others than those whose checksums were taken, and any after ``close``."""
        if self._closed:
            raise InputError("balancing: this Balancer was closed and moves nothing; make another one on all ranks")
        built = [own.name for own in self._layers if getattr(own.layer.dispatcher, "map", None) is not own.map]
        if built:
            raise InputError(
                f"balancing: layers {built} got other experts or another plan since (swap, replan), so nothing is "
                "known of what their slots hold; close() this Balancer on all ranks and make another one"
            )

    def _say(self) -> None:
        """Tell the others how far this rank is; begin what there is to begin."""
        state: Any = None
        if self._queue:
            own, due = self._queue[0]
            if self._moving is None:
                tables = partial(own.map.tables, due.slots)
                self._moving = self._mover.start(own.layer.experts, due.moves, own.sums, tables)
            state = ("moved", self._moving.result().good if self._moving.done() else None)
        elif self._placing is not None:
            state = ("placed", self._placing.done())
        elif self._copied is not None:
            state, self._copied = ("loads", self._copied.read()), None
        else:
            self._copied = self._copy_loads()
        phase = f"balancing at call {self._calls}"
        self._given = self._meeting.post(state, phase), phase

    def _act(self, found: list[Any]) -> None:
        """Do what all ranks do who were told the same."""
        if all(state and state[0] == "moved" and state[1] is not None for state in found):
            assert self._moving is not None
            (own, due), arrived, self._moving = self._queue[0], self._moving.result(), None
            if all(good for _, good in found):
                self._queue.popleft()
                self._switch(own, due, arrived)
            else:
                self.counts.given_up += 1
                if self._metrics is not None and not arrived.good:
                    self._metrics.observe_checksum_failure(own.name)
                self._queue = deque(each for each in self._queue if each[0] is not own)
        elif all(state == ("placed", True) for state in found):
            assert self._placing is not None
            placed, self._placing = self._placing, None
            self._queue.extend(placed.result())
        elif all(state and state[0] == "loads" for state in found):
            total = torch.stack([loads for _, loads in found]).sum(0)
            if not self._queue:  # what ``plan`` asked for meanwhile comes first; they are counted at the next look
                fresh, self._seen = total - self._seen, total
                self._placing = self._mover.aside(self._placed, fresh)

    def _placed(self, loads: Tensor) -> list[tuple[_Layer, Round]]:
        """Return what ``place`` has to move; beside the steps, which it would hold up for milliseconds a layer."""
        assert self._place is not None
        made: list[tuple[_Layer, Round]] = []
        for own, load in zip(self._layers, loads, strict=True):
            shown = tuple(_without_one(slots[: own.room[rank]]) for rank, slots in enumerate(own.map.slots))
            wanted = self._place(load[: own.map.num_experts].numpy(), shown)
            if wanted is not None and wanted != shown:
                made += _rounds(own, wanted)
            time.sleep(0.001)  # who serves may have the interpreter
        return made

    def _copy_loads(self) -> _Copied:
        rows = [own.map.load.to("cpu", non_blocking=True) for own in self._layers]
        on_gpu = self._layers[0].map.load.is_cuda
        return _Copied(rows, torch.cuda.current_stream().record_event() if on_gpu else None, self._seen.shape[1])

    def _switch(self, own: _Layer, due: Round, arrived: Arrived) -> None:
        self.counts.switched += 1
        if arrived.ready is None:
            started = time.perf_counter()
            own.map.switch(due.slots, arrived.tables)
            self._summary(own, due, time.perf_counter() - started)
            return
        stream = torch.cuda.current_stream(own.map.places.device)
        stream.wait_event(arrived.ready)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        own.map.switch(due.slots, arrived.tables)
        after.record(stream)
        for table in arrived.tables:
            table.record_stream(stream)
        self._stalls.append((before, after, own, due))

    def _measured(self, wait: bool = False) -> None:
        """Take the times of switches that are done, or of all."""
        while self._stalls and (wait or self._stalls[0][1].query()):
            before, after, own, due = self._stalls.pop(0)
            after.synchronize()
            self._summary(own, due, before.elapsed_time(after) / 1000)

    def _summary(self, own: _Layer, due: Round, stall: float) -> None:
        here = [move for move in due.moves if move.rank == own.map.rank]
        nbytes = len(here) * own.layer.experts.slot_bytes
        self.counts.stall += stall
        self.counts.moved += len(here)
        self.counts.moved_bytes += nbytes
        if self._metrics is not None:
            self._metrics.observe_rebalance(own.name, here, nbytes, stall)


class _Copied(NamedTuple):
    """Loads on their way to the host, there after ``ready``; wide: experts of the largest layer."""

    rows: list[Tensor]
    ready: Any
    wide: int

    def read(self) -> Tensor:
        if self.ready is not None:
            self.ready.synchronize()
        return torch.stack([torch.nn.functional.pad(row, (0, self.wide - row.numel())) for row in self.rows])


class _Where(NamedTuple):
    group: str
    device: torch.device


def _checked(layers: Mapping[Any, MoELayer]) -> _Where:
    """Return what all layers share; raises InputError where one has no map, no spare slot, or other ranks."""
    groups: set[str] = set()
    for name, layer in layers.items():
        placed, table = layer.plan.problem.placement, getattr(layer.dispatcher, "map", None)
        if placed is None or table is None or placed.spare < 1:
            raise InputError(
                f"balancing layer {name}: asked for {placed} with dispatcher {layer.plan.dispatcher}; needed are "
                "experts split over ranks by a dispatcher with a map, and Placement.spare of at least 1"
            )
        if "mega" in layer.plan.pipelines:
            # Messages hold some multiprocessors until another rank's come; a pass that needs them all waits as long.
            raise InputError(
                f"balancing layer {name}: found the pipeline mega, a kernel that fills the GPU, so that experts could "
                "not travel beside it; take Overrides(pipeline='split')"
            )
        layer.experts.slots()  # refuses what mixes experts
        groups.add(placed.group)
    if len(groups) != 1:
        raise InputError(f"balancing: found layers of process groups {sorted(groups)}; needed is at least one, of one")
    return _Where(groups.pop(), next(iter(layers.values())).handle.device)


def _with_sums(layers: Mapping[Any, MoELayer], meeting: Rendezvous) -> tuple[_Layer, ...]:
    """Take the checksums of what each rank holds, and agree on one for every logical expert."""
    maps: list[Any] = [layer.dispatcher.map for layer in layers.values()]  # pyright: ignore[reportAttributeAccessIssue]
    own: list[dict[int, tuple[int, int]]] = []
    for layer, table in zip(layers.values(), maps, strict=True):
        held = {expert: slot for slot, expert in enumerate(table.slots[table.rank]) if expert != -1}
        with torch.inference_mode():
            sums = torch.stack([checksum(layer.experts.take(slot)) for slot in held.values()]).tolist()
        own.append({expert: (a, b) for expert, (a, b) in zip(held, sums, strict=True)})
    told = meeting.exchange(own, "checksums of packed experts")
    made: list[_Layer] = []
    for place, (name, layer) in enumerate(layers.items()):
        placed, table = layer.plan.problem.placement, maps[place]
        assert placed is not None
        whole = agreed([each[place] for each in told], table.num_experts, name)
        sums = torch.tensor(whole, dtype=torch.int64, device=layer.handle.device)
        room = tuple(len(held) + placed.spare for held in placed.ranks)
        made.append(_Layer(name=name, layer=layer, map=table, room=room, sums=sums))
    return tuple(made)


def _rounds(own: _Layer, wanted: Slots) -> list[tuple[_Layer, Round]]:
    return [(own, each) for each in rounds(own.map.slots, wanted, own.room)]


def _without_one(slots: tuple[int, ...]) -> tuple[int, ...]:
    """Return a rank's slots without the last empty one, which moving needs."""
    last = max((slot for slot, expert in enumerate(slots) if expert == -1), default=len(slots))
    return slots[:last] + slots[last + 1 :]
