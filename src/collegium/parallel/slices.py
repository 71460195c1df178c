"""Tensor-parallel slices: several ranks each hold a slice of every expert's width, and their sums are added.

The ranks of a slice group are called with the same tokens, and the inner dispatcher brings the same rows to each. The
sum over the width becomes one sum for each slice, each rounded to float32, so the bits differ from those of a single
rank. Every rank adds the slices in the order of ranks, so the bits are the same on all ranks and in every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .collectives import start_all_gather
from .dispatch_wrapper import DispatchWrapper, DispatchWrapperKind, WrapperHandle, check_same_tokens
from .groups import check_ranks
from .rendezvous import rendezvous_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..placement import Placement
    from ..problem import Problem
    from ..runtime.memory import Memory
    from ..types import ContiguousBatch, Routing
    from .base import DispatcherKind
    from .collectives import PendingRows

__all__ = ["Slices", "SlicesKind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices(DispatchWrapper):
    """Delegates to ``inner`` as if its experts were not sliced, then sums over the ``size`` ranks of ``group``.

    number: of the layer, among those built over the group.
    """

    size: int
    group: str
    number: int

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, WrapperHandle]:
        """Dispatch through ``inner``; raises InputError on every rank of the slice group where T or layer differ."""
        check_same_tokens("slices", self.group, x.shape[0], self.number)
        batch, inner = self.inner.dispatch(x, routing, memory, block_t=block_t)
        return batch, WrapperHandle(inner=inner, tokens=x.shape[0], device=x.device)

    def send_back(
        self, rows: Tensor, handle: WrapperHandle, memory: Memory | None = None, *, overlap: bool = False
    ) -> PendingRows:
        """Sum the rows of this rank's slice, and start to gather the sums of all slices."""
        local_sum = torch.empty(handle.tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
        returning = self.inner.send_back(rows, handle.inner, memory)
        self.inner.combine(returning, handle.inner, memory, dtype=torch.float32, out=local_sum)
        # Not an all-reduce: its order depends on a row's offset in the buffer, and so on the other tokens.
        return start_all_gather(local_sum, handle.tokens, 0, group=self.group, phase="slices combine", overlap=overlap)

    def combine(
        self,
        returning: PendingRows,
        handle: WrapperHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]``: the slices' sums added in float32 in the order of ranks, plus ``shared``, rounded once."""
        total, *others = returning.wait().chunk(self.size)
        for other in others if handle.tokens else ():
            total.add_(other)
        if shared is not None:
            total.add_(shared)
        return total.to(dtype) if out is None else out.copy_(total)


class SlicesKind(DispatchWrapperKind):
    """Wraps any dispatcher of whole experts; ``local`` where only the width is split."""

    description = "slices of experts"

    def __init__(self, inner: DispatcherKind, placement: Placement) -> None:
        """Describe what is exchanged, and its effect on the bits."""
        super().__init__(inner, placement)
        self.overlaps = "return"
        self.adds = f"float32 sums of {placement.tp_size} slices (not bit-identical to one rank)"

    def inner_problem(self, problem: Problem) -> Problem:
        """Return the problem with unsliced experts."""
        assert problem.placement is not None
        unsliced = replace(problem.placement, tp_rank=0, tp_size=1, slice_size=None, slice_group="")
        return replace(problem, placement=unsliced)

    def refuse(self, problem: Problem, *, requested: bool) -> str | None:
        """Return why ``inner`` cannot serve; dispatchers over shared memory support only unsliced experts."""
        if self.inner.symmetric:
            return f"the placement is {self.placement}; {self.inner.name} supports only unsliced experts"
        return super().refuse(problem, requested=requested)

    def build(self, problem: Problem) -> Slices:
        """Return the dispatcher; all ranks call it together.

        Raises InputError where torch.distributed has other ranks than the placement.
        """
        placement = self.placement
        check_ranks(self.name, placement)
        number = rendezvous_of(placement.slice_group).number_layer()
        inner = self.inner.build(self.inner_problem(problem))
        return Slices(inner=inner, size=placement.tp_size, group=placement.slice_group, number=number)
