"""A dispatcher inside another one, which asks the row of the table a smaller question than the one it was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..problem import Placement, Problem
    from ..runtime.memory import Regions
    from .base import Dispatcher, DispatcherKind
    from .traffic import Away, Traffic

__all__ = ["Around"]


class Around:
    """Base: everything is the answer of ``inner`` to ``inside(problem)``, but for what a subclass says."""

    does: str
    adds: str  # what travels beside what travels inside

    def __init__(self, inner: DispatcherKind, placed: Placement) -> None:
        """Be around ``inner`` for the placement ``placed``."""
        self.inner, self.placed = inner, placed
        self.name = f"{inner.name}, {self.does}"
        self.capturable, self.together, self.reaching = inner.capturable, inner.together, inner.reaching

    def inside(self, problem: Problem) -> Problem:
        """Return what ``inner`` is asked."""
        raise NotImplementedError

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Return why the inner one cannot serve, or None."""
        return self.inner.refuse(self.inside(problem), asked=asked)

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return what ``Dispatcher.rows`` will."""
        return self.inner.rows(self.inside(problem), tokens)

    def capacity(self, problem: Problem) -> int:
        """Return the most rows that one pass brings."""
        return self.inner.capacity(self.inside(problem))

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return the memory of the inner one; what is around it takes torch's own."""
        return self.inner.regions(self.inside(problem), lists=lists)

    def traffic(self, problem: Problem, away: Away) -> Traffic:
        """Return what travels inside alone."""
        return self.inner.traffic(self.inside(problem), away)

    def build(self, problem: Problem) -> Dispatcher:
        """Return the dispatcher of ``problem``."""
        raise NotImplementedError

    def wire(self, problem: Problem) -> str:
        """Return what travels: what travels inside, and what this one adds."""
        inside = self.inner.wire(self.inside(problem))
        return self.adds if inside == "none" else f"{inside} {self.adds}"
