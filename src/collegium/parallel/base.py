"""The dispatcher protocol: tokens to the experts of this rank, and the experts' rows back to their tokens.

A row of ``DISPATCHERS`` (a ``DispatcherKind``) refuses problems, reports how many rows may arrive and how much memory
that needs, and builds a ``Dispatcher`` for one problem. ``dispatch`` returns a frozen handle that only ``combine`` of
the same dispatcher reads.
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
    from .expert_map import ExpertMap
    from .traffic import OutgoingTokens, Traffic

__all__ = ["EXCHANGES", "Dispatcher", "DispatcherKind", "SymmetricDispatcher"]

# Exchanges during which other work can run, and what happens meanwhile.
EXCHANGES = {"dispatch": "while tokens travel to other ranks", "return": "while results return from other ranks"}


class Dispatcher(Protocol):
    """Brings tokens to experts and rows back, for one problem."""

    @property
    def expert_map(self) -> ExpertMap | None:
        """The map of experts to slots, which balancing changes; None where experts cannot move."""
        ...

    def rows(self, tokens: int, top_k: int) -> int:
        """Return the expected number of local rows for ``tokens`` tokens on every rank; tiles are chosen for it."""
        ...

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, Any]:
        """Return the rows of this rank's experts for ``x [T, H]``, and a handle. Does not wait for the device.

        block_t: tile heights for which the batch lists token tiles.
        """
        ...

    def send_back(self, rows: Tensor, handle: Any, memory: Memory | None = None, *, overlap: bool = False) -> Any:
        """Start to return the experts' ``rows`` to the ranks of their tokens; ``combine`` takes the result.

        overlap: other work is queued before ``combine``, and the return should run at the same time.
        """
        ...

    def combine(
        self,
        returning: Any,
        handle: Any,
        /,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]``: each token's weighted rows in slot order, plus ``shared``, rounded to ``dtype`` once.

        returning: the result of ``send_back``.
        """
        ...

    def for_halves(self) -> Dispatcher:
        """Return the dispatcher of half batches; the same one, unless the size of its messages is fixed."""
        ...

    def check(self) -> None:
        """Raise, and clear, errors that replays of a CUDA graph could only record; all ranks call it together."""
        ...


@runtime_checkable
class SymmetricDispatcher(Dispatcher, Protocol):
    """A dispatcher whose ranks read each other's memory.

    Passes run in a memory block that the ranks share, and ``dispatch`` is split into ``send`` and ``receive``.
    """

    @property
    def blocks(self) -> Any:
        """The pool that lends the shared block to passes, with the interface of ``Workspaces``."""
        ...

    def register_layer(self, layout: MemoryMap) -> int:
        """Reserve the regions of ``layout`` for a layer and return the layer's number; all ranks call it together."""
        ...

    def sync_pass(self, memory: Memory, layer: int, tokens: int, top_k: int, *, shares: int = 1) -> Hashable:
        """Agree with the peers on a pass of ``tokens`` local tokens; return a key that equal passes have in common.

        shares: above 1, all ranks have the same tokens and each serves one of ``shares`` shares of them. Raises
        InputError on every rank where the ranks disagree, and RankError where a rank does not respond.
        """
        ...

    def sync_call(self, layer: int, tokens: int, top_k: int, *, shares: int = 1) -> None:
        """Agree as in ``sync_pass``, without a pass that follows; raises the same errors."""
        ...

    def expected_rows(self, posted: Any) -> int:
        """Return the expected number of local rows after ``send`` returned ``posted``; tiles are chosen for it."""
        ...

    def send(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, codes: tuple[str, int] | None = None
    ) -> Any:
        """Make ``x [T, H]`` readable to the peers, without waiting for them.

        codes: activation format and column order in which tokens are written; None: unquantised.
        """
        ...

    def receive(
        self,
        posted: Any,
        memory: Memory | None = None,
        *,
        block_t: tuple[int, ...] = (),
        storing: tuple[int, torch.dtype] | None = None,
    ) -> tuple[ContiguousBatch, Any]:
        """Complete ``dispatch`` with what ``send`` returned.

        storing: width and dtype of the result rows, where the experts can write each row to the rank that owns its
        token (``RemoteOutput``).
        """
        ...


class DispatcherKind(Protocol):
    """One row of ``DISPATCHERS``.

    collective: all ranks call the layer at the same time, so a batch is never split into passes: another rank might
    have fewer of them. symmetric: builds a ``SymmetricDispatcher``. partial_sums: returns this rank's part of each sum,
    which the caller adds up, so no wrapper is put around it. overlaps: the exchange during which other work can run, of
    ``EXCHANGES``; empty: none. no_half_batches: why two halves of a batch cannot be in exchange at the same time; empty
    if they can. fixed_messages: the size of messages between ranks is fixed by ``Limits.rank_tokens``.
    """

    name: str
    capturable: bool
    collective: bool
    symmetric: bool
    partial_sums: bool
    overlaps: str
    no_half_batches: str
    fixed_messages: bool = False

    def refuse(self, problem: Problem, *, requested: bool) -> str | None:
        """Return why it cannot serve ``problem``, or None. requested: whether the user chose it by name."""
        ...

    def wire_format(self, problem: Problem) -> str:
        """Describe what travels between ranks in a planned ``problem``; ``none`` for nothing."""
        ...

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return the value of ``Dispatcher.rows`` before the dispatcher is built."""
        ...

    def capacity(self, problem: Problem) -> int:
        """Return the maximum number of rows that one pass brings to this rank's experts."""
        ...

    def batch_tokens(self, problem: Problem) -> int:
        """Return the maximum number of tokens in one batch of this rank's experts."""
        ...

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return the memory that ``dispatch`` and ``combine`` need. lists: whether batches list token tiles."""
        ...

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return the bytes that a rank exchanges with the others for its outgoing tokens ``away``."""
        ...

    def build(self, problem: Problem) -> Dispatcher:
        """Return the dispatcher of ``problem``."""
        ...
