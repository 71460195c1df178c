"""Interface of a policy: which expert loses its slot to one that a pass needs."""

from dataclasses import dataclass

from ...kernels.arguments import ScoreUpdate

__all__ = ["Policy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One row of ``POLICIES``: every expert has a score, and the lowest one without need loses its slot.

    name, description: as plans print them. update: of the scores, in each pass.
    """

    name: str
    description: str
    update: ScoreUpdate
