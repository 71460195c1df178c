"""Move the experts of a model's layers according to their load while it serves.

Between steps every rank calls ``Balancer.step``, equally often: the number of the call is a clock that all ranks share.
Every few calls the ranks exchange their progress. They act at the next such call, all at the same one, so a map is
switched between the same two steps on every rank, and no rank waits.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from ..errors import InputError
from ..parallel.rendezvous import Rendezvous
from ..pipelines import PIPELINES
from .checksum import agree_on_checksums, checksum
from .mover import Mover, MoveResult, Round, rounds

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
    """What was done so far.

    moved, moved_bytes: experts that came to this rank. switched: maps of layers that were switched. given_up: rounds in
    which a checksum was wrong on some rank. stall: seconds that switches took on the serving stream (on a CPU, of its
    thread).
    """

    moved: int = 0
    moved_bytes: int = 0
    switched: int = 0
    given_up: int = 0
    stall: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _BalancedLayer:
    """A layer by name. slot_counts: slots of each rank. checksums: ``[E, 2]``, of each logical expert."""

    name: Any
    layer: MoELayer
    expert_map: ExpertMap
    slot_counts: tuple[int, ...]
    checksums: Tensor


class _Step(NamedTuple):
    """A round of one layer that is queued or under way."""

    layer: _BalancedLayer
    round: Round


class _Progress(NamedTuple):
    """What a rank reports to the others.

    kind: ``moved``, ``placed`` or ``loads``. value: of moves whether all checksums are right, None while under way; of
    a placement whether it is computed; or the loads ``[layers, E]``.
    """

    kind: str
    value: Any


class _PendingSwitch(NamedTuple):
    """A switch that was queued on the stream between two events."""

    before: torch.cuda.Event
    after: torch.cuda.Event
    step: _Step


class Balancer:
    """Rebalances ``layers``, split over the same ranks with at least one spare slot each; all ranks create it together.

    place: ``(load [E], slots) -> slots or None``, pure, for instance ``policy_named("greedy").place``: the new
    placement, None to keep the current one. It is called every ``interval`` steps, in a separate thread, and never sees
    the last empty slot of a rank. ``step`` raises its exceptions, on every rank; then nothing moves until it is called
    again. Without it experts move only as ``plan`` requests. every: calls between two exchanges while work is under
    way. metrics: receives what came to this rank. counts: what was done. Raises InputError on every rank for layers
    that cannot move experts, and where ranks packed an expert into different bytes.
    """

    mover_type: ClassVar[type[Mover]] = Mover

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
        _check_positive("interval", interval)
        _check_positive("every", every)
        group, device = _common_group(layers)
        self.counts = Counts()
        self._place = place
        self._interval = interval
        self._every = every
        self._metrics = metrics
        # Separate ones: an exchange of loads() must not come between a post of step() and its wait.
        self._rendezvous = Rendezvous(group)
        self._load_rendezvous = Rendezvous(group)
        self._layers = _with_checksums(layers, self._rendezvous)
        self._mover = self.mover_type(self._rendezvous, device)
        self._calls = 0
        self._next_call = interval if place else 0
        self._posted: tuple[int, str] | None = None  # number and phase of the exchange to wait for
        self._closed = False
        self._queue: deque[_Step] = deque()
        self._moving: Future[MoveResult] | None = None
        self._placing: Future[list[_Step]] | None = None
        max_experts = max(layer.expert_map.num_experts for layer in self._layers)
        self._previous_loads = torch.zeros(len(self._layers), max_experts, dtype=torch.int64)
        self._load_copy: _LoadCopy | None = None
        self._pending_switches: list[_PendingSwitch] = []
        if place is not None:
            self.record()

    def record(self, on: bool = True) -> None:
        """Start or stop counting the assignments of logical experts; does not wait for the device."""
        for layer in self._layers:
            layer.expert_map.recording.fill_(int(on))

    def loads(self) -> Tensor:
        """Return ``[layers, E]`` int64: assignments counted so far on all ranks, which call it together."""
        loads = self._load_rendezvous.exchange(self._copy_loads().read(), "summing loads")
        return torch.stack(loads).sum(0)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._queue and self._posted is None

    @property
    def stall(self) -> float:
        """Seconds that switches have taken on the serving stream so far; waits for those under way."""
        self._collect_stalls(wait=True)
        return self.counts.stall

    def plan(self, placements: Mapping[Any, Slots]) -> None:
        """Begin to move experts to the given slots of layers, by name; all ranks pass the same in the same call.

        Raises InputError, and begins nothing, for unknown layers, impossible placements, and layers that were rebuilt.
        """
        self._check_layers()
        layers = {layer.name: layer for layer in self._layers}
        unknown = [name for name in placements if name not in layers]
        if unknown or self._queue or self._placing is not None:
            raise InputError(
                f"balancing: requested moves of layers {list(placements)} with {len(self._queue)} rounds under way; "
                f"allowed are {list(layers)}, when idle"
            )
        steps = [step for name, slots in placements.items() for step in _steps(layers[name], slots)]
        self._queue.extend(steps)
        if steps and self._posted is None:
            self._next_call = self._calls + 1

    def step(self) -> None:
        """Do what is due between two steps; every rank calls it equally often, on the serving stream.

        Raises RankError where another rank is gone or out of step, InputError for layers that were rebuilt.
        """
        self._calls += 1
        if self._calls != self._next_call:
            return
        self._check_layers()
        self._collect_stalls()
        posted = self._posted
        self._posted = None
        self._next_call = self._calls + self._every
        if posted is not None:
            self._act(self._rendezvous.wait(*posted))
        busy = self._queue or self._load_copy is not None or self._placing is not None
        if busy or (self._place and self._calls % self._interval < self._every):
            self._report()
        elif self._place:
            self._next_call = self._calls - self._calls % self._interval + self._interval
        else:
            self._next_call = 0

    def close(self) -> None:
        """Stop moving; all ranks call it. Layers go on serving with their current maps."""
        self._closed = True
        self._mover.close()

    def _check_layers(self) -> None:
        """Refuse calls after ``close``, and layers whose experts may differ from those of the checksums."""
        if self._closed:
            raise InputError("balancing: this Balancer was closed and moves nothing; make another one on all ranks")
        rebuilt = [layer.name for layer in self._layers if layer.layer.dispatcher.expert_map is not layer.expert_map]
        if rebuilt:
            raise InputError(
                f"balancing: layers {rebuilt} got other experts or another plan since (swap, replan), so the contents "
                "of their slots are unknown; close() this Balancer on all ranks and make another one"
            )

    def _report(self) -> None:
        """Post this rank's progress; begin the next piece of work."""
        progress: _Progress | None = None
        if self._queue:
            layer, due = self._queue[0]
            if self._moving is None:
                tables = partial(layer.expert_map.tables, due.slots)
                self._moving = self._mover.start(layer.layer.experts, due.moves, layer.checksums, tables)
            progress = _Progress("moved", self._moving.result().ok if self._moving.done() else None)
        elif self._placing is not None:
            progress = _Progress("placed", self._placing.done())
        elif self._load_copy is not None:
            progress = _Progress("loads", self._load_copy.read())
            self._load_copy = None
        else:
            self._load_copy = self._copy_loads()
        phase = f"balancing at call {self._calls}"
        self._posted = self._rendezvous.post(progress, phase), phase

    def _act(self, reports: list[_Progress | None]) -> None:
        """Do what follows from the progress of all ranks; every rank has the same reports."""
        values = [report.value for report in reports if report is not None]
        kinds = {None if report is None else report.kind for report in reports}
        if kinds == {"moved"} and None not in values:
            self._finish_moves(all(values))
        elif kinds == {"placed"} and all(values):
            assert self._placing is not None
            placing = self._placing
            self._placing = None
            self._queue.extend(placing.result())
        elif kinds == {"loads"} and not self._queue:
            # With requests of ``plan`` in the queue the loads are ignored, and counted at the next exchange.
            total = torch.stack(values).sum(0)
            loads = total - self._previous_loads
            self._previous_loads = total
            self._placing = self._mover.submit(self._compute_steps, loads)

    def _finish_moves(self, ok: bool) -> None:
        """Switch the layer of the finished round, or give up its rounds if a checksum was wrong on any rank."""
        assert self._moving is not None
        step = self._queue[0]
        result = self._moving.result()
        self._moving = None
        if ok:
            self._queue.popleft()
            self._switch(step, result)
            return
        self.counts.given_up += 1
        if self._metrics is not None and not result.ok:
            self._metrics.observe_checksum_failure(step.layer.name)
        self._queue = deque(other for other in self._queue if other.layer is not step.layer)

    def _compute_steps(self, loads: Tensor) -> list[_Step]:
        """Return the moves that ``place`` requires; runs in a thread, since it takes milliseconds for each layer."""
        assert self._place is not None
        steps: list[_Step] = []
        for layer, load in zip(self._layers, loads, strict=True):
            expert_map = layer.expert_map
            usable = tuple(
                _without_last_empty(slots[: layer.slot_counts[rank]]) for rank, slots in enumerate(expert_map.slots)
            )
            target = self._place(load[: expert_map.num_experts].numpy(), usable)
            if target is not None and target != usable:
                steps += _steps(layer, target)
            time.sleep(0.001)  # let the serving thread have the interpreter lock
        return steps

    def _copy_loads(self) -> _LoadCopy:
        rows = [layer.expert_map.load.to("cpu", non_blocking=True) for layer in self._layers]
        on_gpu = self._layers[0].expert_map.load.is_cuda
        ready = torch.cuda.current_stream().record_event() if on_gpu else None
        return _LoadCopy(rows, ready, self._previous_loads.shape[1])

    def _switch(self, step: _Step, result: MoveResult) -> None:
        self.counts.switched += 1
        expert_map = step.layer.expert_map
        if result.ready is None:
            started = time.perf_counter()
            expert_map.switch(step.round.slots, result.tables)
            self._observe(step, time.perf_counter() - started)
            return
        stream = torch.cuda.current_stream(expert_map.physical_ids.device)
        stream.wait_event(result.ready)
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record(stream)
        expert_map.switch(step.round.slots, result.tables)
        after.record(stream)
        for table in result.tables:
            table.record_stream(stream)
        self._pending_switches.append(_PendingSwitch(before, after, step))

    def _collect_stalls(self, wait: bool = False) -> None:
        """Add the times of finished switches to the counts. wait: for all switches."""
        while self._pending_switches and (wait or self._pending_switches[0].after.query()):
            switch = self._pending_switches.pop(0)
            switch.after.synchronize()
            self._observe(switch.step, switch.before.elapsed_time(switch.after) / 1000)

    def _observe(self, step: _Step, stall: float) -> None:
        layer = step.layer
        arrivals = [move for move in step.round.moves if move.rank == layer.expert_map.rank]
        nbytes = len(arrivals) * layer.layer.experts.slot_bytes
        self.counts.stall += stall
        self.counts.moved += len(arrivals)
        self.counts.moved_bytes += nbytes
        if self._metrics is not None:
            self._metrics.observe_rebalance(layer.name, arrivals, nbytes, stall)


class _LoadCopy(NamedTuple):
    """Loads on their way to the host, complete after ``ready``. max_experts: of the largest layer."""

    rows: list[Tensor]
    ready: Any
    max_experts: int

    def read(self) -> Tensor:
        if self.ready is not None:
            self.ready.synchronize()
        padded = [torch.nn.functional.pad(row, (0, self.max_experts - row.numel())) for row in self.rows]
        return torch.stack(padded)


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise InputError(f"balancing: {name}={value!r} was requested; allowed: 1 call or more")


def _common_group(layers: Mapping[Any, MoELayer]) -> tuple[str, torch.device]:
    """Return the process group and device of all layers.

    Raises InputError for layers that cannot move experts, and for different groups.
    """
    groups: set[str] = set()
    for name, layer in layers.items():
        placement = layer.plan.problem.placement
        if placement is None or layer.dispatcher.expert_map is None or placement.spare < 1:
            raise InputError(
                f"balancing layer {name}: found {placement} with dispatcher {layer.plan.dispatcher}; needed are "
                "experts split over ranks by a dispatcher with a map, and Placement.spare of at least 1"
            )
        for kind in PIPELINES:
            if kind.fills_gpu and kind.name in layer.plan.pipelines:
                # Messages occupy some multiprocessors until those of another rank arrive; a pass that needs all of them
                # would wait as long.
                raise InputError(
                    f"balancing layer {name}: found the pipeline {kind.name}, a kernel that fills the GPU, so that "
                    "experts could not travel at the same time; take Overrides(pipeline='split')"
                )
        layer.experts.slots()  # refuses kernels that pack experts together
        groups.add(placement.group)
    if len(groups) != 1:
        raise InputError(f"balancing: found layers of process groups {sorted(groups)}; needed is at least one, of one")
    return groups.pop(), next(iter(layers.values())).handle.device


def _with_checksums(layers: Mapping[Any, MoELayer], rendezvous: Rendezvous) -> tuple[_BalancedLayer, ...]:
    """Compute the checksums of this rank's experts, and agree on the checksum of every logical expert."""
    local = [_local_checksums(layer) for layer in layers.values()]
    tables = rendezvous.exchange(local, "checksums of packed experts")
    balanced: list[_BalancedLayer] = []
    for index, (name, layer) in enumerate(layers.items()):
        placement = layer.plan.problem.placement
        expert_map = layer.dispatcher.expert_map
        assert placement is not None
        assert expert_map is not None
        common = agree_on_checksums([table[index] for table in tables], expert_map.num_experts, name)
        balanced.append(
            _BalancedLayer(
                name=name,
                layer=layer,
                expert_map=expert_map,
                slot_counts=tuple(len(ids) + placement.spare for ids in placement.ranks),
                checksums=torch.tensor(common, dtype=torch.int64, device=layer.handle.device),
            )
        )
    return tuple(balanced)


def _local_checksums(layer: MoELayer) -> dict[int, tuple[int, int]]:
    """Return the checksum of each expert on this rank, by logical id."""
    expert_map = layer.dispatcher.expert_map
    assert expert_map is not None
    slots = {expert: slot for slot, expert in enumerate(expert_map.slots[expert_map.rank]) if expert != -1}
    with torch.inference_mode():
        checksums = torch.stack([checksum(layer.experts.take(slot)) for slot in slots.values()]).tolist()
    return {expert: (first, second) for expert, (first, second) in zip(slots, checksums, strict=True)}


def _steps(layer: _BalancedLayer, target: Slots) -> list[_Step]:
    return [_Step(layer, due) for due in rounds(layer.expert_map.slots, target, layer.slot_counts)]


def _without_last_empty(slots: tuple[int, ...]) -> tuple[int, ...]:
    """Return a rank's slots without the last empty one, which moving needs."""
    last = max((slot for slot, expert in enumerate(slots) if expert == -1), default=len(slots))
    return slots[:last] + slots[last + 1 :]
