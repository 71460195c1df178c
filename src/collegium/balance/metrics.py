"""Prometheus metrics of experts that are split over ranks. Requires the extra ``metrics``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import InputError, MissingExtraError
from .slots import balancedness, checked_load, rank_loads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from .slots import Move, Slots

__all__ = ["Metrics"]

# Seconds of one exchange between ranks: from a few tokens over NVLink to a large batch over a slow network.
_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1, 1.0)


class Metrics:
    """Counters and gauges of one process, in a ``registry`` of prometheus_client.

    Callers report observations from any thread, outside the forward pass: nothing here reads a device. A given registry
    must not contain these metrics yet (ValueError). Raises MissingExtraError without prometheus_client.
    """

    def __init__(self, registry: Any = None) -> None:
        """Create the metrics in ``registry``, or in a new registry."""
        client = _client()
        self.registry = client.CollectorRegistry() if registry is None else registry

        def create(kind: Any, name: str, description: str, *labels: str, **options: Any) -> Any:
            return kind(f"collegium_{name}", description, labels, registry=self.registry, **options)

        counter = client.Counter
        self._expert = create(counter, "expert_tokens", "assignments to each logical expert", "layer", "expert")
        self._rank = create(counter, "rank_tokens", "assignments computed by each rank", "layer", "rank")
        self._balance = create(client.Gauge, "balancedness", "mean over busiest rank, last observed", "layer")
        self._seconds = create(client.Histogram, "exchange_seconds", "time of one exchange", "phase", buckets=_SECONDS)
        self._bytes = create(counter, "exchange_bytes", "bytes sent to other ranks", "phase")
        self._rebalances = create(counter, "rebalances", "placements switched", "layer")
        self._moved = create(counter, "moved_experts", "experts copied to another slot", "layer")
        self._moved_bytes = create(counter, "moved_bytes", "bytes of experts copied to another slot", "layer")
        self._stall = create(counter, "stall_seconds", "time the serving stream waited for rebalancing")
        self._faults = create(counter, "checksum_failures", "experts that arrived with other bytes", "layer")
        # Alerts need the series from the start: its rate is 0, not absent.
        for name in ("dispatch", "combine"):
            self._seconds.labels(name)
            self._bytes.labels(name)

    def observe_load(self, layer: str | int, counts: ArrayLike, slots: Slots | None = None) -> None:
        """Add assignments ``[E]`` of a layer since the last call; with ``slots`` also those of each rank, and balance.

        Balancedness is meaningful only with the counts of all ranks' tokens. Raises InputError.
        """
        load = checked_load(counts)
        name = str(layer)
        if load.ndim != 1:
            raise InputError(f"observe_load: found counts {load.shape}, needed are [E] of one layer; call it for each")
        loads = None if slots is None else rank_loads(load, slots)
        for expert in np.flatnonzero(load).tolist():
            self._expert.labels(name, str(expert)).inc(load[expert])
        if slots is not None and loads is not None:
            for rank, assignments in enumerate(loads.tolist()):
                self._rank.labels(name, str(rank)).inc(assignments)
            self._balance.labels(name).set(balancedness(load, slots))

    def observe_exchange(self, phase: Literal["dispatch", "combine"], seconds: float, nbytes: int) -> None:
        """Add one exchange of this rank: its duration, and the bytes it sent."""
        self._seconds.labels(phase).observe(seconds)
        self._bytes.labels(phase).inc(nbytes)

    def observe_rebalance(self, layer: str | int, moved: Sequence[Move], nbytes: int, stall: float) -> None:
        """Add a switched placement: the moves, their bytes, and the seconds that the serving stream waited."""
        self._rebalances.labels(str(layer)).inc()
        self._moved.labels(str(layer)).inc(len(moved))
        self._moved_bytes.labels(str(layer)).inc(nbytes)
        self._stall.inc(stall)

    def observe_checksum_failure(self, layer: str | int) -> None:
        """Add an expert that arrived with wrong bytes."""
        self._faults.labels(str(layer)).inc()

    def text(self) -> str:
        """Return everything in the text format that Prometheus scrapes."""
        return _client().generate_latest(self.registry).decode()


def _client() -> Any:
    try:
        return importlib.import_module("prometheus_client")
    except ImportError as error:
        raise MissingExtraError(
            "prometheus_client is not installed; install it with: pip install 'collegium[metrics]'"
        ) from error
