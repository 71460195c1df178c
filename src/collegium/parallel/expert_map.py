"""The map of experts to slots: device tables that dispatchers read in every pass and that balancing changes.

A physical id names a slot of a rank: ``rank * width + slot``, with the ranks that split the experts and ``width``, the
maximum number of slots of a rank. An expert may have replicas, in any slots. They are served in turn: token n of a
rank goes to replica ``(n + rank) % replicas``, so the choice does not depend on other tokens of the batch. All replicas
hold the same bits, so the choice does not change the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InputError
from .traffic import OutgoingTokens

if TYPE_CHECKING:
    from torch import Tensor

    from ..placement import Placement

__all__ = ["ExpertMap", "MapTables"]

# What ``choose`` returns instead of a physical id.
_NO_EXPERT = -1  # for an id of -1, which adds nothing
_INVALID = -2  # for any other id that is no expert


class MapTables(NamedTuple):
    """The tables that ``ExpertMap`` holds for one assignment of experts to slots; see there."""

    physical_ids: Tensor
    replica_counts: Tensor

    def to(self, device: torch.device) -> MapTables:
        """Return the tables on ``device``."""
        return MapTables(self.physical_ids.to(device), self.replica_counts.to(device))


class ExpertMap:
    """The map of one layer on one rank.

    slots: the expert in each slot of every rank, -1 for an empty slot. physical_ids: ``[E, P]`` int32, the slots of
    each expert in the order of ranks, padded with the first one; P is the maximum number of replicas of an expert, 1
    where each slot is needed for a different expert. replica_counts: ``[E]`` int32. local_mask: ``[E]`` int32, 1 for
    the experts of this rank, otherwise 0. load: ``[E]`` int64, assignments of this rank's tokens, counted while
    ``recording [1]`` int32 is not 0. Dispatchers keep references to these tensors, so ``switch`` writes into them.
    """

    def __init__(self, placement: Placement, num_experts: int, device: torch.device | str) -> None:
        """Start with the experts of ``placement``; raises InputError as ``switch`` does."""
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.width = placement.width
        self.num_experts = num_experts
        self.slots: tuple[tuple[int, ...], ...] = ()
        with torch.inference_mode(False):
            max_replicas = _max_replicas(num_experts, self.world_size, self.width)
            self.local_mask = torch.zeros(num_experts, dtype=torch.int32, device=device)
            self.physical_ids = torch.zeros(num_experts, max_replicas, dtype=torch.int32, device=device)
            self.replica_counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
            self.load = torch.zeros(num_experts, dtype=torch.int64, device=device)
            self.recording = torch.zeros(1, dtype=torch.int32, device=device)
        ranks = placement.ranks or (placement.expert_ids,)
        self.switch(tuple(ids + (-1,) * (self.width - len(ids)) for ids in ranks))

    def tables(self, slots: tuple[tuple[int, ...], ...]) -> MapTables:
        """Return the tables for ``slots``, on the host; raises InputError as ``switch`` does."""
        return _tables(slots, self.num_experts, self.world_size, self.width)

    def switch(self, slots: tuple[tuple[int, ...], ...], tables: MapTables | None = None) -> None:
        """Serve from ``slots`` from the next pass on; the tables are copied on the current stream.

        tables: those of ``slots``, if they are already on the device; then nothing waits for a copy from the host.
        Raises InputError, and changes nothing, for an expert that has no slot.
        """
        if tables is None:
            tables = self.tables(slots)
        with torch.inference_mode(False):
            self.physical_ids.copy_(tables.physical_ids)
            self.replica_counts.copy_(tables.replica_counts)
            is_local = tables.physical_ids // self.width == self.rank
            self.local_mask.copy_(is_local.any(dim=1))
        self.slots = slots

    def choose(self, ids: Tensor, first: int = 0, rank: int | None = None) -> Tensor:
        """Return the physical id of each assignment: ``[T, K]`` int64; -1 for an id of -1, -2 for other invalid ids.

        ids: ``[T, K]`` integers of the tokens from number ``first`` on of ``rank`` (default: this rank). Does not wait
        for the device.
        """
        expert = ids.to(torch.int64)
        valid = (expert >= 0) & (expert < self.num_experts)
        expert_or_0 = expert.masked_fill(~valid, 0)
        token = torch.arange(first, first + ids.shape[0], device=ids.device)[:, None]
        replica = (token + (self.rank if rank is None else rank)) % self.replica_counts[expert_or_0]
        candidates = self.physical_ids[expert_or_0]
        physical = candidates.gather(-1, replica[..., None].to(torch.int64)).squeeze(-1).to(torch.int64)
        return torch.where(valid, physical, torch.where(expert == -1, _NO_EXPERT, _INVALID))

    def local(self, physical_ids: Tensor) -> Tensor:
        """Return the local slot of each physical id, -1 for slots of other ranks, ``width`` for invalid ids (-2)."""
        slot = physical_ids - self.rank * self.width
        is_local = (slot >= 0) & (slot < self.width)
        return torch.where(is_local, slot, torch.where(physical_ids == _INVALID, self.width, -1))

    def away(self, ids: Tensor, max_tokens: int | None = None) -> OutgoingTokens:
        """Return what other ranks receive of this rank's tokens with ``ids [T, K]``; waits for the device.

        max_tokens: tokens of the rank with the most; T when None.
        """
        physical = self.choose(ids)
        tokens = ids.shape[0]
        rank = torch.where(physical < 0, self.rank, physical // self.width)
        others = torch.tensor([r for r in range(self.world_size) if r != self.rank], device=ids.device)
        copies = (rank[:, :, None] == others).any(dim=1).sum()
        rows = (rank != self.rank).sum()
        return OutgoingTokens(tokens, tokens if max_tokens is None else max_tokens, int(copies), int(rows))

    def record(self, ids: Tensor) -> None:
        """Add the assignments ``ids [T, K]`` of this rank's tokens to ``load`` while ``recording`` is not 0."""
        expert = ids.to(torch.int64).reshape(-1)
        valid = (expert >= 0) & (expert < self.num_experts)
        self.load.index_add_(0, expert.masked_fill(~valid, 0), valid.to(torch.int64) * self.recording)


def _max_replicas(experts: int, ranks: int, width: int) -> int:
    return max(1, ranks * width - experts + 1)


def _tables(slots: tuple[tuple[int, ...], ...], experts: int, ranks: int, width: int) -> MapTables:
    widths = [len(rank_slots) for rank_slots in slots]
    if widths != [width] * ranks:
        raise InputError(f"expert map: found slots {widths}, allowed: {width} for {ranks} ranks")
    physical: list[list[int]] = [[] for _ in range(experts)]
    for rank, rank_slots in enumerate(slots):
        for slot, expert in enumerate(rank_slots):
            if expert == -1:
                continue
            if not 0 <= expert < experts:
                raise InputError(
                    f"expert map: rank {rank} has {list(rank_slots)}; allowed are experts 0 to {experts - 1} and -1 "
                    "for an empty slot"
                )
            physical[expert].append(rank * width + slot)
    missing = [expert for expert, ids in enumerate(physical) if not ids]
    if missing:
        raise InputError(f"expert map: experts {missing[:8]} are on no rank; every expert needs a slot")
    max_replicas = _max_replicas(experts, ranks, width)
    padded = [ids + ids[:1] * (max_replicas - len(ids)) for ids in physical]
    return MapTables(
        physical_ids=torch.tensor(padded, dtype=torch.int32),
        replica_counts=torch.tensor([len(ids) for ids in physical], dtype=torch.int32),
    )
