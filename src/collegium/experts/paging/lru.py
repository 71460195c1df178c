"""Least recently used: the score is minus the number of passes since the expert was needed."""

from ...kernels.arguments import ScoreUpdate
from .policy import Policy

__all__ = ["LRU"]

LRU = Policy(
    name="lru",
    description="the least recently used expert is replaced",
    update=ScoreUpdate(needed_factor=0.0, needed_step=0.0, other_factor=1.0, other_step=-1.0),
)
