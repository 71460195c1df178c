"""Where each expert is: tables on the device that dispatchers read at every call, and that balancing changes.

A place is ``rank * width + slot``, of the ranks that split the experts; ``width`` is the slots of a rank at most. An
expert with several places is served by each in turn: the n-th token that a rank brings goes to the place
``(n + rank) % copies``, so which place computes a row depends on nothing else in the batch. All places of an expert
hold the same bits, so which of them computes a row changes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from .traffic import OutgoingTokens

if TYPE_CHECKING:
    from torch import Tensor

    from ..placement import Placement

__all__ = ["ExpertMap"]


class ExpertMap:
    """The tables of one layer on one rank.

    slots: of every rank the expert in each slot, -1 where there is none; what the tables hold.
    places: ``[E, P]`` int32, the places of each expert in the order of ranks, the first one repeated to fill the row;
        P is the most that an expert can have, 1 where all slots are needed for one place each.
    copies: ``[E]`` int32, how many places an expert has.
    load: ``[E]`` int64, the assignments of this rank's tokens counted while ``recording [1]`` int32 is not 0.
    Dispatchers keep these tensors; ``switch`` writes into them.
    """

    def __init__(self, placement: Placement, num_experts: int, device: torch.device | str) -> None:
        """Start as ``placement`` says, which tells what every rank holds; errors as ``switch``."""
        self.rank, self.world_size = placement.rank, placement.world_size
        self.width, self.num_experts = placement.width, num_experts
        self.slots: tuple[tuple[int, ...], ...] = ()
        with torch.inference_mode(False):
            most = _most_places(num_experts, self.world_size, self.width)
            self.places = torch.zeros(num_experts, most, dtype=torch.int32, device=device)
            self.copies = torch.zeros(num_experts, dtype=torch.int32, device=device)
            self.load = torch.zeros(num_experts, dtype=torch.int64, device=device)
            self.recording = torch.zeros(1, dtype=torch.int32, device=device)
        held = placement.ranks or (placement.expert_ids,)
        self.switch(tuple(ids + (-1,) * (self.width - len(ids)) for ids in held))

    def tables(self, slots: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
        """Return what ``places`` and ``copies`` are to be for ``slots``, on the host; errors as ``switch``."""
        return _tables(slots, self.num_experts, self.world_size, self.width)

    def switch(self, slots: tuple[tuple[int, ...], ...], tables: tuple[Tensor, Tensor] | None = None) -> None:
        """Let ``slots`` hold from the next call on; the copies are queued on the current stream.

        tables: those of ``slots``, where they have been brought to the device before, so that nothing waits for it.
        Raises InputError, and changes nothing, for an expert that is nowhere or twice on a rank.
        """
        places, copies = self.tables(slots) if tables is None else tables
        with torch.inference_mode(False):
            self.places.copy_(places)
            self.copies.copy_(copies)
        self.slots = slots

    def choose(self, ids: Tensor, first: int = 0, rank: int | None = None) -> Tensor:
        """Return the place of each assignment: ``[T, K]`` int64; -1 for an id of -1, -2 for any other that is nobody's.

        ids: ``[T, K]`` integers of the tokens from ``first`` on that ``rank`` brings, this one when None. Reads nothing
        on the host.
        """
        wide = ids.to(torch.int64)
        known = (wide >= 0) & (wide < self.num_experts)
        safe = wide.masked_fill(~known, 0)
        token = torch.arange(first, first + ids.shape[0], device=ids.device)[:, None]
        turn = (token + (self.rank if rank is None else rank)) % self.copies[safe]
        found = self.places[safe].gather(-1, turn[..., None].to(torch.int64)).squeeze(-1).to(torch.int64)
        return torch.where(known, found, torch.where(wide == -1, -1, -2))

    def local(self, places: Tensor) -> Tensor:
        """Return the slot of each place on this rank, -1 for one elsewhere, and ``width`` for nobody's (-2)."""
        slot = places - self.rank * self.width
        here = (slot >= 0) & (slot < self.width)
        return torch.where(here, slot, torch.where(places == -2, self.width, -1))

    def away(self, ids: Tensor, most: int | None = None) -> OutgoingTokens:
        """Return what of this rank's tokens with ``ids [T, K]`` goes to other ranks; waits for the device.

        most: tokens of the rank that brings the most, T when None.
        """
        places, tokens = self.choose(ids), ids.shape[0]
        rank = torch.where(places < 0, self.rank, places // self.width)
        others = torch.tensor([r for r in range(self.world_size) if r != self.rank], device=ids.device)
        copies = (rank[:, :, None] == others).any(dim=1).sum()
        rows = (rank != self.rank).sum()
        return OutgoingTokens(tokens, tokens if most is None else most, int(copies), int(rows))

    def record(self, ids: Tensor) -> None:
        """Add the assignments ``ids [T, K]`` of this rank's tokens to ``load``, if ``recording`` says so."""
        wide = ids.to(torch.int64).reshape(-1)
        known = (wide >= 0) & (wide < self.num_experts)
        self.load.index_add_(0, wide.masked_fill(~known, 0), known.to(torch.int64) * self.recording)


def _most_places(experts: int, ranks: int, width: int) -> int:
    return max(1, min(ranks, ranks * width - experts + 1))


def _tables(slots: tuple[tuple[int, ...], ...], experts: int, ranks: int, width: int) -> tuple[Tensor, Tensor]:
    if len(slots) != ranks or any(len(own) != width for own in slots):
        raise InputError(f"expert map: found slots {[len(own) for own in slots]}, allowed: {width} for {ranks} ranks")
    found: list[list[int]] = [[] for _ in range(experts)]
    for rank, own in enumerate(slots):
        for slot, expert in enumerate(own):
            if expert == -1:
                continue
            if not 0 <= expert < experts or any(place // width == rank for place in found[expert]):
                raise InputError(
                    f"expert map: rank {rank} has {list(own)}; allowed are experts 0 to {experts - 1}, each once on a "
                    "rank, and -1 for an empty slot"
                )
            found[expert].append(rank * width + slot)
    missing = [expert for expert, own in enumerate(found) if not own]
    if missing:
        raise InputError(f"expert map: experts {missing[:8]} are on no rank; every expert needs a place")
    copies = torch.tensor([len(own) for own in found], dtype=torch.int32)
    most = _most_places(experts, ranks, width)
    places = torch.tensor([own + own[:1] * (most - len(own)) for own in found], dtype=torch.int32)
    return places, copies
