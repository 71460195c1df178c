"""Static: scores are the counts of a trace and never change, so the most frequent experts keep their slots."""

from ...kernels.arguments import ScoreUpdate
from .policy import Policy

__all__ = ["STATIC"]

STATIC = Policy(
    name="static",
    description="the expert with the lowest count in a trace is replaced",
    update=ScoreUpdate(needed_factor=1.0, needed_step=0.0, other_factor=1.0, other_step=0.0),
)
