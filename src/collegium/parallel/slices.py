"""Several ranks each hold a slice of every expert's width (tensor parallel): what they computed is added up.

The ranks of one slice group are called with the same tokens, and whatever is inside brings the same rows to each. The
sum over the width is then cut into as many sums as there are slices, each rounded to float32: the bits are not those of
a single rank. Every rank adds the slices in their order, so they are the same on every rank, in every run and batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .collectives import gathered
from .dispatch_wrapper import DispatchWrapper, DispatchWrapperKind, WrapperHandle, check_same_tokens
from .expert_parallel import said_of
from .groups import check_ranks
from .rendezvous import rendezvous_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory
    from ..types import ContiguousBatch, Routing

__all__ = ["Slices", "SlicesKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices(DispatchWrapper):
    """``inner`` as if it had whole experts, and a sum over the ``size`` ranks of ``group``.

    number: of the layer among those built over the group.
    """

    size: int
    group: str
    number: int

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, WrapperHandle]:
        """Dispatch as the inner one does; raises InputError on every rank of a slice group where T or layer differ."""
        check_same_tokens("slices", self.group, x.shape[0], self.number)
        batch, inner = self.inner.dispatch(x, routing, memory, block_t=block_t)
        return batch, WrapperHandle(inner=inner, tokens=x.shape[0])

    def combine(
        self,
        rows: Tensor,
        handle: WrapperHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]``: the slices' sums added in float32 in the order of ranks, plus ``shared``, rounded once."""
        own = torch.empty(handle.tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
        self.inner.combine(rows, handle.inner, memory, dtype=torch.float32, out=own)
        # Not an all-reduce: its order depends on where in the buffer a row is, and so on the other tokens.
        first, *others = gathered(own, handle.tokens, 0, group=self.group, phase="slices combine").chunk(self.size)
        for other in others if handle.tokens else ():
            first.add_(other)
        if shared is not None:
            first.add_(shared)
        return first.to(dtype) if out is None else out.copy_(first)


class SlicesKind(DispatchWrapperKind):
    """Around any row of the table, ``local`` where slices are all that is split."""

    does = "slices of experts"

    def __init__(self, inner: Any, placed: Any) -> None:
        """Say what travels and what it costs in bits."""
        super().__init__(inner, placed)
        self.adds = f"the sums of {placed.tp_size} slices in float32 (other bits than those of one rank)"

    def inner_problem(self, problem: Problem) -> Problem:
        """Return the question as if experts were whole."""
        assert problem.placement is not None
        whole = replace(problem.placement, tp_rank=0, tp_size=1, slice_size=None, slice_group="")
        return replace(problem, placement=whole)

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Return why the inner one cannot serve; one whose passes run in shared memory takes whole experts alone."""
        if self.inner.symmetric:
            return f"asked for {self.placed}; it brings tokens to whole experts"
        return super().refuse(problem, asked=asked)

    def build(self, problem: Problem) -> Slices:
        """Return the dispatcher; all ranks build it at the same time.

        Raises InputError on every rank where torch.distributed has other ranks than the placement, or where the ranks
        of a slice group were planned for different layers.
        """
        placed = self.placed
        check_ranks(self.name, placed)
        asked = said_of(problem) | {"experts": placed.expert_ids, "slice_size": placed.slice_size}
        number = rendezvous_of(placed.slice_group).build(asked, "slices: building a layer")
        inner = self.inner.build(self.inner_problem(problem))
        return Slices(inner=inner, size=placed.tp_size, group=placed.slice_group, number=number)
