"""What a dispatcher is: it brings tokens to the experts of this rank, and their rows back.

A row of ``DISPATCHERS`` refuses problems, says how many rows may arrive and what memory that takes, and is built for
one problem. ``dispatch`` and ``combine`` share a frozen handle that nobody else looks into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory, MemoryMap, Regions
    from ..types import ContiguousBatch, Routing
    from .traffic import OutgoingTokens, Traffic

__all__ = ["Dispatcher", "DispatcherKind", "SymmetricDispatcher"]


class Dispatcher(Protocol):
    """Tokens to rows and back, for one problem."""

    def rows(self, tokens: int, top_k: int) -> int:
        """Return how many rows ``tokens`` tokens of every rank are likely to be here; tiles are chosen for it."""
        ...

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, Any]:
        """Return the rows of this rank's experts for ``x [T, H]``, and a handle; reads nothing on the host.

        block_t: row counts whose token tile lists the batch is to bring.
        """
        ...

    def combine(
        self,
        rows: Tensor,
        handle: Any,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]``: each token's weighted rows in slot order, plus ``shared``, rounded to ``dtype`` once."""
        ...

    def check(self) -> None:
        """Raise what replays of a CUDA graph could only note, and forget it; all ranks ask at the same time."""
        ...


@runtime_checkable
class SymmetricDispatcher(Dispatcher, Protocol):
    """A dispatcher whose ranks read each other's memory: passes run in a block that it shares, and it has two halves.

    blocks: lends that block, as ``Workspaces`` lends workspaces.
    """

    @property
    def blocks(self) -> Any:
        """What lends the memory of passes."""
        ...

    def register_layer(self, places: MemoryMap) -> int:
        """Make room for a layer with the regions of ``places`` and return its number; all ranks ask together."""
        ...

    def sync_pass(self, memory: Memory, layer: int, tokens: int, top_k: int, *, shares: int = 1) -> Hashable:
        """Agree with the peers on a pass of ``tokens`` tokens here; return what it has in common with passes like it.

        shares: above 1 every rank has the same tokens, and serves one of so many shares of them. Raises InputError on
        every rank where they disagree, and RankError where one does not come.
        """
        ...

    def sync_call(self, layer: int, tokens: int, top_k: int, *, shares: int = 1) -> None:
        """Agree as ``meet`` does, without a pass that follows; raises the same errors."""
        ...

    def expected_rows(self, posted: Any) -> int:
        """Return how many rows are likely to be here after ``send`` returned ``posted``; tiles are chosen for it."""
        ...

    def send(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, codes: tuple[str, int] | None = None
    ) -> Any:
        """Let peers read ``x [T, H]``, as codes of a format and order where given; begin no wait."""
        ...

    def receive(
        self,
        posted: Any,
        memory: Memory | None = None,
        *,
        block_t: tuple[int, ...] = (),
        storing: tuple[int, torch.dtype] | None = None,
    ) -> tuple[ContiguousBatch, Any]:
        """Do the rest of ``dispatch`` with what ``send`` returned.

        storing: width and dtype of the rows, where the experts can store each at its owner's (``Back``).
        """
        ...


class DispatcherKind(Protocol):
    """One row of ``DISPATCHERS``.

    collective: all ranks call at the same time, so a batch is never cut into passes, which another rank might have
    fewer of. symmetric: it builds a ``SymmetricDispatcher``.
    """

    name: str
    capturable: bool
    collective: bool
    symmetric: bool

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Return why it cannot serve ``problem``, or None. asked: whether a user chose it by name."""
        ...

    def wire_format(self, problem: Problem) -> str:
        """Return in words what travels between ranks in ``problem`` as the plan completed it, ``none`` for nothing."""
        ...

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return what ``Dispatcher.rows`` will, before it is built."""
        ...

    def capacity(self, problem: Problem) -> int:
        """Return the most rows that one pass brings to this rank's experts."""
        ...

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return the memory of ``dispatch`` and ``combine`` at most. lists: whether tile lists are asked for."""
        ...

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return the bytes between a rank and the others for its tokens, of which ``away`` goes elsewhere."""
        ...

    def build(self, problem: Problem) -> Dispatcher:
        """Return the dispatcher of ``problem``."""
        ...
