"""What a trace holds, layer by layer, and what a policy would do about it: the answers behind two commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from ..parallel.placement import linear
from .load import LoadTrace
from .simulate import Simulation, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Hottest", "LoadReport", "look_at_load", "simulate_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hottest:
    """One layer: its most and its least loaded expert, in times of an even share, and the experts nobody asked."""

    layer: str
    expert: int
    most: float
    coldest: int
    least: float
    idle: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a trace holds. assignments: of all layers and steps."""

    path: str
    model: str
    steps: int
    experts: int
    top_k: int
    assignments: int
    layers: tuple[Hottest, ...]


def look_at_load(path: str) -> LoadReport:
    """Read a trace and return its extremes, layer by layer. Raises InputError for a file that is none."""
    trace = LoadTrace.open(path)
    shares = trace.shares()
    layers = [
        Hottest(
            layer=name,
            expert=int(own.argmax()),
            most=float(own.max()),
            coldest=int(own.argmin()),
            least=float(own.min()),
            idle=int((own == 0).sum()),
        )
        for name, own in zip(trace.layers, shares, strict=True)
    ]
    return LoadReport(
        path=path,
        model=trace.model,
        steps=trace.counts.shape[0],
        experts=trace.counts.shape[2],
        top_k=trace.top_k,
        assignments=int(np.sum(trace.counts)),
        layers=tuple(layers),
    )


def simulate_file(path: str, ranks: int, replicas: Sequence[int], *, policy: str, hosts: int) -> Simulation:
    """Simulate ``policy`` on the trace at ``path``, from consecutive experts a rank. Raises InputError."""
    trace = LoadTrace.open(path)
    experts = trace.counts.shape[2]
    if not 2 <= ranks <= experts:
        raise InputError(f"--ranks {ranks}: {path} has {experts} experts; allowed are 2 to {experts} ranks")
    return simulate(trace, linear(experts, 0, ranks).ranks, replicas, policy=policy, hosts=hosts)
