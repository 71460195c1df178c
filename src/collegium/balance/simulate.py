"""What a policy would have done to a recorded load, in the steps it saw and in those after them."""

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

__all__ = ["Judged", "Simulated", "Simulation", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Balancedness over some steps, mean of the layers and worst layer, where experts were and where they are put.

    saved: the part of the busiest ranks' work, all steps and layers together, that is gone; negative where it grew.
    """

    before: float
    before_worst: float
    after: float
    after_worst: float
    saved: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """One count of replicas. seen: the first half of the steps, which the policy was shown; later: the other half.

    slots: of a rank. moved_experts, moved_bytes: copied to another slot, in all layers.
    """

    replicas: int
    slots: int
    moved_experts: int
    moved_bytes: int
    seen: Judged
    later: Judged


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """All counts of replicas for one trace, policy and number of ranks."""

    model: str
    steps: int
    layers: int
    experts: int
    ranks: int
    hosts: int
    policy: str
    rows: tuple[Simulated, ...]


def simulate(
    trace: LoadTrace, start: Slots, replicas: Sequence[int], *, policy: str = "greedy", hosts: int = 1
) -> Simulation:
    """Place the experts of every layer for the first half of ``trace`` and judge both halves.

    start: where experts are before, the same in every layer. replicas: slots of a layer beyond one for each expert,
    shared evenly by the ranks, rounded up. Raises InputError for a trace of one step, and where experts do not fit.
    """
    steps, layers, experts = trace.counts.shape
    ranks, half = len(start), steps // 2
    if steps < 2:
        raise InputError(
            f"simulate: {trace.model} has {steps} step; one half is shown to the policy and the other is judged, so 2 "
            "are needed: record more text"
        )
    place, rows = policy_named(policy).place, list[Simulated]()
    for extra in replicas:
        if not 0 <= extra <= experts * (ranks - 1):
            raise InputError(
                f"simulate: {extra} replicas of {experts} experts on {ranks} ranks were asked; allowed are 0 to "
                f"{experts * (ranks - 1)}, every expert on every rank"
            )
        width = max(-(-(experts + extra) // ranks), *(len(own) for own in start))
        current = widened(start, width)
        seen = trace.counts[:half].sum(axis=0)
        made = [place(seen[layer], current, hosts=hosts, groups=trace.groups) for layer in range(layers)]
        moved = sum(len(moves(current, new)) for new in made)
        rows.append(
            Simulated(
                replicas=extra,
                slots=width,
                moved_experts=moved,
                moved_bytes=moved * trace.expert_bytes,
                seen=_judged(trace.counts[:half], start, made),
                later=_judged(trace.counts[half:], start, made),
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


def _judged(counts: NDArray[np.int64], start: Slots, made: Sequence[Slots]) -> Judged:
    layers = [counts[:, layer] for layer in range(counts.shape[1])]
    before = [balancedness(own, start) for own in layers]
    after = [balancedness(own, new) for own, new in zip(layers, made, strict=True)]
    was = sum(float(rank_loads(own, start).max(axis=-1).sum()) for own in layers)
    now = sum(float(rank_loads(own, new).max(axis=-1).sum()) for own, new in zip(layers, made, strict=True))
    return Judged(
        before=float(np.mean(before)),
        before_worst=min(before),
        after=float(np.mean(after)),
        after_worst=min(after),
        saved=1 - now / was if was else 0.0,
    )
