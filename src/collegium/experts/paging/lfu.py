"""Least frequently used: the score counts the passes that needed the expert, those long ago less."""

from ...kernels.arguments import ScoreUpdate
from .policy import Policy

__all__ = ["LFU"]

_DECAY = 0.99  # of a count in each pass: half of it is gone after 69 passes

LFU = Policy(
    name="lfu",
    description="the least frequently used expert is replaced; counts halve in 69 passes",
    update=ScoreUpdate(needed_factor=_DECAY, needed_step=1.0, other_factor=_DECAY, other_step=0.0),
)
