"""What an engine tells Prometheus of experts over ranks. Needs the extra ``metrics``; nothing else here does."""

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

    Callers report what they know, from any thread, off the way of the tokens: nothing here reads a device. A registry
    that is given must not hold these metrics yet (ValueError). Raises MissingExtraError without prometheus_client.
    """

    def __init__(self, registry: Any = None) -> None:
        """Make the metrics in ``registry``, in a new one without."""
        client = _client()
        self.registry = client.CollectorRegistry() if registry is None else registry

        def made(kind: Any, name: str, what: str, labels: Sequence[str] = (), **more: Any) -> Any:
            return kind(f"collegium_{name}", what, labels, registry=self.registry, **more)

        counter, each, phase = client.Counter, ("layer", "expert"), ("phase",)
        self._expert = made(counter, "expert_tokens", "assignments to each logical expert", each)
        self._rank = made(counter, "rank_tokens", "assignments computed by each rank", ("layer", "rank"))
        self._balance = made(client.Gauge, "balancedness", "mean over busiest rank, last observed", ("layer",))
        self._seconds = made(client.Histogram, "exchange_seconds", "time of one exchange", phase, buckets=_SECONDS)
        self._bytes = made(counter, "exchange_bytes", "bytes sent to other ranks", phase)
        self._rebalances = made(counter, "rebalances", "placements switched", ("layer",))
        self._moved = made(counter, "moved_experts", "experts copied to another slot", ("layer",))
        self._moved_bytes = made(counter, "moved_bytes", "bytes of experts copied to another slot", ("layer",))
        self._stall = made(counter, "stall_seconds", "time the serving stream waited for rebalancing")
        self._faults = made(counter, "checksum_failures", "experts that arrived with other bytes", ("layer",))
        # A rate of what never happened is 0, not absent: alerts need the series.
        for name in ("dispatch", "combine"):
            self._seconds.labels(name)
            self._bytes.labels(name)

    def observe_load(self, layer: str | int, counts: ArrayLike, slots: Slots | None = None) -> None:
        """Add assignments ``[E]`` of a layer since the last call; with ``slots`` also those of each rank, and balance.

        Counts of all ranks' tokens are needed for a balancedness that says what it means. Raises InputError.
        """
        found, name = checked_load(counts), str(layer)
        if found.ndim != 1:
            raise InputError(f"observe_load: found counts {found.shape}, needed are [E] of one layer; call it for each")
        loads = None if slots is None else rank_loads(found, slots)
        for expert in np.flatnonzero(found).tolist():
            self._expert.labels(name, str(expert)).inc(found[expert])
        if slots is not None and loads is not None:
            for rank, load in enumerate(loads.tolist()):
                self._rank.labels(name, str(rank)).inc(load)
            self._balance.labels(name).set(balancedness(found, slots))

    def observe_exchange(self, phase: Literal["dispatch", "combine"], seconds: float, nbytes: int) -> None:
        """Add one exchange of this rank: how long it took and what it sent."""
        self._seconds.labels(phase).observe(seconds)
        self._bytes.labels(phase).inc(nbytes)

    def observe_rebalance(self, layer: str | int, moved: Sequence[Move], nbytes: int, stall: float) -> None:
        """Add a placement that was switched: what moved, its bytes, the seconds the serving stream waited."""
        self._rebalances.labels(str(layer)).inc()
        self._moved.labels(str(layer)).inc(len(moved))
        self._moved_bytes.labels(str(layer)).inc(nbytes)
        self._stall.inc(stall)

    def observe_checksum_failure(self, layer: str | int) -> None:
        """Add an expert that arrived with other bytes than it was sent with."""
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
