"""The policy ``least_moves``: from the current placement on, the changes with the largest gain per moved expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .greedy import greedy, host_of
from .local_search import best_swap
from .slots import aligned, balancedness, checked_load, holders

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .slots import Slots

__all__ = ["TOLERANCE", "least_moves"]

TOLERANCE = 0.02  # accepted difference of balancedness from greedy's


def least_moves(load: ArrayLike, current: Slots, *, hosts: int = 1, groups: int = 1) -> Slots:
    """Return a placement for ``load [E]`` in the slots of ``current``, never less balanced, with few experts moved.

    Repeats the best change of the busiest rank: swap an expert with another rank's, move it to an empty slot, replicate
    it in an empty slot or over a replica that is not the last, replicate it over an expert that moves to an empty slot
    here, or give up a replica. Ends within ``TOLERANCE`` of what ``greedy`` reaches, or when no change relieves the
    busiest rank. With hosts and groups, as in ``greedy``, experts do not leave their host. If ``current`` lacks experts
    the result is that of greedy, which places them. Raises as ``greedy`` does.
    """
    loads = checked_load(load)
    greedy_slots = greedy(loads, current, hosts=hosts, groups=groups)
    if not holders(current, len(loads)).any(axis=0).all():
        return greedy_slots
    target = balancedness(loads, greedy_slots) - TOLERANCE
    hosts_of = np.array(host_of(len(current), hosts if groups > 1 else 1))
    # Of several slots of an expert on one rank, which balance nothing, one stays.
    result = aligned(current, [{*rank_slots} - {-1} for rank_slots in current])
    for _ in range(sum(len(rank_slots) for rank_slots in current)):
        if balancedness(loads, result) >= target:
            break
        changed = best_swap(loads, result, hosts_of)
        if changed is None:
            break
        result = changed
    result = aligned(current, [{expert for expert in rank_slots if expert != -1} for rank_slots in result])
    return result if balancedness(loads, result) > balancedness(loads, current) else current
