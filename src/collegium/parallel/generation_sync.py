"""Ranks that share a model's experts while it writes: the same text on all of them, or texts that end together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .collectives import gathered
from .rendezvous import rendezvous_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..placement import Placement

__all__ = ["GenerationSync"]


class GenerationSync:
    """The ranks that share the experts of a model with this one; none, as a rule."""

    def __init__(self, placed: Placement | None, asked: tuple[int, bool]) -> None:
        """Agree on what is asked: the number of tokens and whether any stops. placed: of the model's experts."""
        self.same: tuple[str, ...] = () if placed is None else placed.groups
        self.apart: str | None = None
        if placed is not None and placed.world_size > 1 and not placed.same_tokens:
            self.apart, self.same = placed.groups[0], placed.groups[1:]
            rendezvous_of(self.apart).agree(asked, "generate: number of tokens, and whether any stops")

    def choice(self, chosen: Tensor) -> Tensor:
        """Return the first rank's ``chosen [B]`` where all write the same text.

        Each rank has made the same choice, unless a driver, a seed or a kernel of one of them gives another bit; then
        texts would drift apart without an error.
        """
        for group in self.same:
            chosen = gathered(chosen, chosen.shape[0], 0, group=group, phase="generate")[: chosen.shape[0]]
        return chosen

    def ended(self, ended: Tensor) -> bool:
        """Return whether all sequences have ended, also those of other ranks, whose experts need this one."""
        if self.apart is None:
            return bool(ended.all())
        return all(rendezvous_of(self.apart).exchange(bool(ended.all()), "generate: has it ended"))
