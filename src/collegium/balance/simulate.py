"""Simulate a policy on a recorded load: in the steps that it was fitted to, and in those after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from .policy import policy_named
from .slots import balancedness, moves, rank_loads, widened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .load import LoadTrace
    from .slots import Slots

__all__ = ["Balance", "Simulation", "SimulationRow", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Balancedness over some steps, mean of all layers and of the worst layer, with the old and the new placement.

    saved: the fraction of the busiest ranks' work, over all steps and layers, that is saved; negative for an increase.
    """

    before: float
    before_worst: float
    after: float
    after_worst: float
    saved: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationRow:
    """One number of replicas.

    slots: of a rank. moved_experts, moved_bytes: copied to another slot, in all layers. fitted: the first half of the
    steps, from which the policy computed the placement; later: the second half.
    """

    replicas: int
    slots: int
    moved_experts: int
    moved_bytes: int
    fitted: Balance
    later: Balance


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """All numbers of replicas for one trace, policy and number of ranks."""

    model: str
    steps: int
    layers: int
    experts: int
    ranks: int
    hosts: int
    policy: str
    rows: tuple[SimulationRow, ...]


def simulate(
    trace: LoadTrace, start: Slots, replicas: Sequence[int], *, policy: str = "greedy", hosts: int = 1
) -> Simulation:
    """Place the experts of every layer for the first half of ``trace``, and compute the balance of both halves.

    start: the old placement, the same in every layer. replicas: numbers of slots of a layer in addition to one for each
    expert, divided evenly among the ranks, rounded up. Raises InputError for a trace of one step, and where experts do
    not fit.
    """
    steps, layers, experts = trace.counts.shape
    ranks = len(start)
    half = steps // 2
    if steps < 2:
        raise InputError(
            f"simulate: {trace.model} has {steps} step; the policy is fitted to one half and evaluated on the other, "
            "so 2 are needed: record more text"
        )
    place = policy_named(policy).place
    rows: list[SimulationRow] = []
    for count in replicas:
        if not 0 <= count <= experts * (ranks - 1):
            raise InputError(
                f"simulate: {count} replicas of {experts} experts on {ranks} ranks were requested; allowed are 0 to "
                f"{experts * (ranks - 1)}, every expert on every rank"
            )
        width = max(-(-(experts + count) // ranks), *(len(rank_slots) for rank_slots in start))
        current = widened(start, width)
        load = trace.counts[:half].sum(axis=0)
        placements = [place(load[layer], current, hosts=hosts, groups=trace.groups) for layer in range(layers)]
        moved = sum(len(moves(current, placement)) for placement in placements)
        rows.append(
            SimulationRow(
                replicas=count,
                slots=width,
                moved_experts=moved,
                moved_bytes=moved * trace.expert_bytes,
                fitted=_balance(trace.counts[:half], start, placements),
                later=_balance(trace.counts[half:], start, placements),
            )
        )
    return Simulation(
        model=trace.model,
        steps=steps,
        layers=layers,
        experts=experts,
        ranks=ranks,
        hosts=hosts,
        policy=policy,
        rows=tuple(rows),
    )


def _balance(counts: NDArray[np.int64], start: Slots, placements: Sequence[Slots]) -> Balance:
    loads = [counts[:, layer] for layer in range(counts.shape[1])]
    before = [balancedness(load, start) for load in loads]
    after = [balancedness(load, placement) for load, placement in zip(loads, placements, strict=True)]
    work_before = sum(_busiest_load(load, start) for load in loads)
    work_after = sum(_busiest_load(load, placement) for load, placement in zip(loads, placements, strict=True))
    return Balance(
        before=float(np.mean(before)),
        before_worst=min(before),
        after=float(np.mean(after)),
        after_worst=min(after),
        saved=1 - work_after / work_before if work_before else 0.0,
    )


def _busiest_load(load: NDArray[np.int64], slots: Slots) -> float:
    """Return the assignments of the busiest rank, summed over steps."""
    return float(rank_loads(load, slots).max(axis=-1).sum())
