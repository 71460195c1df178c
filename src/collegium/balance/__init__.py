"""Expert load balancing: measure how evenly ranks are loaded, and compute where experts should be.

The functions exported here are pure functions of counts and slots.
"""

from .load import LoadTrace
from .policy import POLICIES, Policy, policy_named, saved_seconds, should_move
from .slots import Move, Slots, balancedness, moves, rank_loads, widened

__all__ = [
    "POLICIES",
    "LoadTrace",
    "Move",
    "Policy",
    "Slots",
    "balancedness",
    "moves",
    "policy_named",
    "rank_loads",
    "saved_seconds",
    "should_move",
    "widened",
]
