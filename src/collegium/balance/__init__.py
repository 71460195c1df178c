"""How even the work of ranks is, and where experts should be instead: pure functions over counts and slots."""

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
