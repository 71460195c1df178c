"""Dispatchers that wrap another dispatcher.

A wrapper changes the problem (a share of the tokens, experts that are not sliced), delegates it to ``inner``, and then
adds an exchange. There is one for ranks with the same tokens (``same_tokens.py``) and one for slices of experts
(``slices.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from torch import distributed

from .input_check import Contribution, check_contributions
from .rendezvous import rendezvous_of

if TYPE_CHECKING:
    import torch

    from ..placement import Placement
    from ..problem import Problem
    from ..runtime.memory import Regions
    from .base import Dispatcher, DispatcherKind
    from .expert_map import ExpertMap
    from .traffic import OutgoingTokens, Traffic

__all__ = ["DispatchWrapper", "DispatchWrapperKind", "WrapperHandle", "check_same_tokens"]


def check_same_tokens(name: str, group: str, tokens: int, layer: int = 0) -> None:
    """Raise InputError on every rank of ``group`` unless all have ``tokens`` tokens; all ranks call it together.

    name: of the dispatcher, for errors. layer: number of the layer, which is compared too; 0 where an inner dispatcher
    compares it. Raises RankError where a rank does not respond, or compares its inputs while this one does not.
    """
    # The same exchange as in ``InputCheck``: ranks that compare inputs in this pass and ranks that do not are detected.
    contribution = Contribution(rank=distributed.get_rank(), tokens=tokens, layer=layer)
    tables = rendezvous_of(group).exchange([contribution], f"{name} dispatch")
    check_contributions(name, [entry for table in tables for entry in table])


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapperHandle:
    """The handle of the inner dispatcher, and number and device of the tokens of the whole batch."""

    inner: Any
    tokens: int
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchWrapper:
    """Base of wrapping dispatchers; delegates to ``inner``."""

    inner: Dispatcher

    @property
    def expert_map(self) -> ExpertMap | None:
        """The map of experts to slots of ``inner``."""
        return self.inner.expert_map

    def rows(self, tokens: int, top_k: int) -> int:
        """Return the expected number of local rows of ``inner``."""
        return self.inner.rows(tokens, top_k)

    def for_halves(self) -> Self:
        """Return the wrapper of the dispatcher of half batches."""
        return replace(self, inner=self.inner.for_halves())

    def check(self) -> None:
        """Raise the recorded errors of ``inner``."""
        self.inner.check()


class DispatchWrapperKind:
    """Base of wrapping kinds: answers with what ``inner`` answers for ``inner_problem(problem)``.

    description: what the wrapper does, as part of its name. adds: what it adds to the wire format of ``inner``.
    """

    description: str
    adds: str
    partial_sums = False

    def __init__(self, inner: DispatcherKind, placement: Placement) -> None:
        """Wrap ``inner`` for ``placement``."""
        self.inner = inner
        self.placement = placement
        self.name = f"{inner.name}, {self.description}"
        self.capturable = inner.capturable
        self.collective = inner.collective
        self.symmetric = inner.symmetric
        self.overlaps = inner.overlaps
        self.no_half_batches = inner.no_half_batches
        self.fixed_messages = inner.fixed_messages

    def inner_problem(self, problem: Problem) -> Problem:
        """Return the smaller problem that ``inner`` solves."""
        raise NotImplementedError

    def refuse(self, problem: Problem, *, requested: bool) -> str | None:
        """Return why ``inner`` cannot serve the inner problem, or None."""
        return self.inner.refuse(self.inner_problem(problem), requested=requested)

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return the expected number of local rows of ``inner``."""
        return self.inner.rows(self.inner_problem(problem), tokens)

    def capacity(self, problem: Problem) -> int:
        """Return the maximum number of local rows of ``inner``."""
        return self.inner.capacity(self.inner_problem(problem))

    def batch_tokens(self, problem: Problem) -> int:
        """Return the maximum number of tokens in one batch of ``inner``."""
        return self.inner.batch_tokens(self.inner_problem(problem))

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return the regions of ``inner``; the wrapper allocates with torch."""
        return self.inner.regions(self.inner_problem(problem), lists=lists)

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return the traffic of ``inner`` alone."""
        return self.inner.traffic(self.inner_problem(problem), away)

    def build(self, problem: Problem) -> Dispatcher:
        """Return the dispatcher of ``problem``."""
        raise NotImplementedError

    def wire_format(self, problem: Problem) -> str:
        """Describe what ``inner`` and the wrapper exchange."""
        inner = self.inner.wire_format(self.inner_problem(problem))
        return self.adds if inner == "none" else f"{inner}; {self.adds}"
