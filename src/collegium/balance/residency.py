"""How many experts of a recorded load would be missing on a GPU with slots for some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InputError
from ..ops.paging import decide, new_tables, schedule

if TYPE_CHECKING:
    from ..experts.paging.policy import Policy
    from .load import LoadTrace

__all__ = ["Misses", "expected_misses"]

_CPU = torch.device("cpu")


class Misses(NamedTuple):
    """Means over layers and passes: experts that a pass needs in a layer, and those of them without a slot."""

    needed: float
    missing: float

    @property
    def hit_rate(self) -> float:
        """Share of the needed experts that have a slot."""
        return 1 - self.missing / self.needed if self.needed else 1.0


def expected_misses(trace: LoadTrace, slots: int, policy: Policy) -> Misses:
    """Return the misses of ``trace`` with ``slots`` slots in each layer; each of its steps is a pass.

    The first step, in which slots have any experts, is not counted. ``static`` has the counts of the trace as scores.
    Raises InputError for fewer than two steps.
    """
    steps, layers, experts = trace.counts.shape
    if steps < 2:
        raise InputError(
            f"trace of {trace.model}: found {steps} step; at least 2 are needed, the first fills the slots"
        )
    if slots >= experts:
        return Misses(float((trace.counts[1:] > 0).sum() / ((steps - 1) * layers)), 0.0)
    counts = torch.from_numpy(trace.counts)
    totals = torch.zeros(2, dtype=torch.int64)
    for layer in range(layers):
        scores = counts[:, layer].sum(0) if policy.name == "static" else None
        tables = new_tables(experts, slots, _CPU, scores)
        for step in range(steps):
            ids = counts[step, layer].nonzero().T
            decide(ids, tables, policy.update, schedule(ids.numel(), experts, slots))
            if step == 0:
                tables.counters.zero_()
        totals += tables.counters
    hits, misses = totals.tolist()
    passes = (steps - 1) * layers
    return Misses((hits + misses) / passes, misses / passes)
