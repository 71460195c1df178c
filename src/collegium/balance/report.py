"""Summaries of a load trace, and of what a policy would do about it: the results of two commands."""

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

__all__ = ["LayerLoad", "LoadReport", "look_at_load", "simulate_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """The extremes of one layer.

    expert, max_share: the most loaded expert, and its load as a multiple of an even share. coldest, min_share: the same
    of the least loaded one. idle: number of experts without any assignment.
    """

    layer: str
    expert: int
    max_share: float
    coldest: int
    min_share: float
    idle: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Summary of a trace. assignments: of all layers and steps."""

    path: str
    model: str
    steps: int
    experts: int
    top_k: int
    assignments: int
    layers: tuple[LayerLoad, ...]


def look_at_load(path: str) -> LoadReport:
    """Read a trace and return the extremes of each layer. Raises InputError for a file that is not a trace."""
    trace = LoadTrace.open(path)
    layers = [
        LayerLoad(
            layer=name,
            expert=int(shares.argmax()),
            max_share=float(shares.max()),
            coldest=int(shares.argmin()),
            min_share=float(shares.min()),
            idle=int((shares == 0).sum()),
        )
        for name, shares in zip(trace.layers, trace.shares(), strict=True)
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
    """Simulate ``policy`` on the trace at ``path``, starting with consecutive experts on each rank.

    Raises InputError.
    """
    trace = LoadTrace.open(path)
    experts = trace.counts.shape[2]
    if not 2 <= ranks <= experts:
        raise InputError(f"--ranks {ranks}: {path} has {experts} experts; allowed are 2 to {experts} ranks")
    return simulate(trace, linear(experts, 0, ranks).ranks, replicas, policy=policy, hosts=hosts)
