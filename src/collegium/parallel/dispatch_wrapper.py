"""A dispatcher inside another one, which asks the row of the table a smaller question than the one it was asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import distributed

from .input_check import Contribution, check_contributions
from .rendezvous import rendezvous_of

if TYPE_CHECKING:
    from ..placement import Placement
    from ..problem import Problem
    from ..runtime.memory import Regions
    from .base import Dispatcher, DispatcherKind
    from .expert_map import ExpertMap
    from .traffic import OutgoingTokens, Traffic

__all__ = ["DispatchWrapper", "DispatchWrapperKind", "WrapperHandle", "check_same_tokens"]


def check_same_tokens(name: str, group: str, tokens: int, layer: int = 0) -> None:
    """Raise InputError on every rank of ``group`` unless all bring as many ``tokens``; all ranks ask together.

    name: of what needs that, as ``Around`` has it. layer: its number, which has to be the same too, where nothing
    inside compares it. Raises RankError where a rank does not come, or compares its inputs and this one does not.
    """
    # In the form of ``InputCheck``, so that a rank that compares its inputs in this pass and one that does not hear so.
    own = Contribution(rank=distributed.get_rank(), tokens=tokens, layer=layer)
    rows = rendezvous_of(group).exchange([own], f"{name} dispatch")
    check_contributions(name, [each for row in rows for each in row])


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapperHandle:
    """What the inner dispatcher needs, and how many tokens there are."""

    inner: Any
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchWrapper:
    """Base of the dispatcher that an ``Around`` builds: what it does not say itself, ``inner`` does."""

    inner: Dispatcher

    def rows(self, tokens: int, top_k: int) -> int:
        """Return those of the inner one."""
        return self.inner.rows(tokens, top_k)

    @property
    def map(self) -> ExpertMap:
        """Where experts are, for the inner one."""
        return self.inner.map  # pyright: ignore[reportAttributeAccessIssue]

    def check(self) -> None:
        """Ask the inner one."""
        self.inner.check()


class DispatchWrapperKind:
    """Base: everything is the answer of ``inner`` to ``inside(problem)``, but for what a subclass says."""

    does: str
    adds: str  # what travels beside what travels inside

    def __init__(self, inner: DispatcherKind, placed: Placement) -> None:
        """Be around ``inner`` for the placement ``placed``."""
        self.inner, self.placed = inner, placed
        self.name = f"{inner.name}, {self.does}"
        self.capturable, self.collective, self.symmetric = inner.capturable, inner.collective, inner.symmetric

    def inner_problem(self, problem: Problem) -> Problem:
        """Return what ``inner`` is asked."""
        raise NotImplementedError

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Return why the inner one cannot serve, or None."""
        return self.inner.refuse(self.inner_problem(problem), asked=asked)

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return what ``Dispatcher.rows`` will."""
        return self.inner.rows(self.inner_problem(problem), tokens)

    def capacity(self, problem: Problem) -> int:
        """Return the most rows that one pass brings."""
        return self.inner.capacity(self.inner_problem(problem))

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return the memory of the inner one; what is around it takes torch's own."""
        return self.inner.regions(self.inner_problem(problem), lists=lists)

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return what travels inside alone."""
        return self.inner.traffic(self.inner_problem(problem), away)

    def build(self, problem: Problem) -> Dispatcher:
        """Return the dispatcher of ``problem``."""
        raise NotImplementedError

    def wire_format(self, problem: Problem) -> str:
        """Return what travels: what travels inside, and what this one adds."""
        inside = self.inner.wire_format(self.inner_problem(problem))
        return self.adds if inside == "none" else f"{inside} {self.adds}"
