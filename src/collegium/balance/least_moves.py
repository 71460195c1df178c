"""The policy ``least_moves``: from where experts are, the changes that gain most for each expert that has to move."""

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

TOLERANCE = 0.02  # of balancedness: as good as greedy's up to this is good enough


def least_moves(load: ArrayLike, current: Slots, *, hosts: int = 1, groups: int = 1) -> Slots:
    """Return a placement for ``load [E]`` in the slots of ``current``, never less balanced, with few experts moved.

    Takes the busiest rank's best change again and again: swap an expert with another rank's, move it to an empty slot,
    copy it to an empty slot or over a copy that is not the last, copy it over an expert that moves to an empty slot
    here, or give up a copy. Ends within ``TOLERANCE`` of what ``greedy`` reaches, or where no change relieves the
    busiest rank. With hosts and groups as ``greedy`` has them nothing leaves its host. Where ``current`` lacks experts
    the result is greedy's, which places them. Raises as it does.
    """
    loads = checked_load(load)
    wanted = greedy(loads, current, hosts=hosts, groups=groups)
    if not holders(current, len(loads)).any(axis=0).all():
        return wanted
    target = balancedness(loads, wanted) - TOLERANCE
    hosts_of = np.array(host_of(len(current), hosts if groups > 1 else 1))
    found = current
    for _ in range(sum(len(own) for own in current)):
        changed = None if balancedness(loads, found) >= target else best_swap(loads, found, hosts_of)
        if changed is None:
            break
        found = changed
    found = aligned(current, [{expert for expert in own if expert != -1} for own in found])
    return found if balancedness(loads, found) > balancedness(loads, current) else current
