"""Synchronise text generation between the ranks that share a model's experts.

Ranks either generate the same text, or different texts that end in the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .collectives import all_gather_rows
from .rendezvous import rendezvous_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..placement import Placement

__all__ = ["GenerationSync"]


class GenerationSync:
    """The ranks that share the experts of a model with this one, if any.

    same_groups: process groups whose ranks generate the same text. apart_group: group whose ranks generate different
    texts, or None.
    """

    def __init__(self, placement: Placement | None, settings: tuple[int, bool]) -> None:
        """Agree on ``settings``: the number of tokens, and whether any token stops.

        placement: of the model's experts.
        """
        self.same_groups: tuple[str, ...] = () if placement is None else placement.groups
        self.apart_group: str | None = None
        if placement is not None and placement.world_size > 1 and not placement.same_tokens:
            self.apart_group = placement.groups[0]
            self.same_groups = placement.groups[1:]
            rendezvous_of(self.apart_group).agree(settings, "generate: number of tokens, and whether any stops")

    def choice(self, chosen: Tensor) -> Tensor:
        """Return the first rank's ``chosen [B]`` where all generate the same text.

        All ranks have made the same choice, unless a driver, a seed or a kernel of one of them gives another bit; then
        texts would diverge without an error.
        """
        for group in self.same_groups:
            gathered = all_gather_rows(chosen, chosen.shape[0], 0, group=group, phase="generate")
            chosen = gathered[: chosen.shape[0]]
        return chosen

    def ended(self, ended: Tensor) -> bool:
        """Return whether all sequences have ended, also those of other ranks, which need this rank's experts."""
        if self.apart_group is None:
            return bool(ended.all())
        return all(rendezvous_of(self.apart_group).exchange(bool(ended.all()), "generate: has it ended"))
