"""Which experts one of several ranks holds, and which part of them."""

from dataclasses import dataclass

from .types import require

__all__ = ["Placement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which experts and which slice of their intermediate width this rank holds.

    rank, world_size: among the ranks that split the experts. expert_ids: logical ids of the local experts, in local
    slot order, each once; several ranks may hold the same expert. spare: slots after those that hold no expert yet.
    tp_rank, tp_size: the slice of I held here: rows of gate and up, columns of down.
    slice_size: rows of the slice; None: I / tp_size, rounded up. A slice that is filled up to whole groups has more.
    ranks: what every rank holds, in the order of ranks, for dispatchers that send tokens to others; empty: not told.
    same_tokens: every rank is called with the same tokens, instead of its own; each then serves a share of them.
    group, slice_group: names of the process groups of those that split the experts, and of those that hold the slices
    of one part; empty: torch's default group.
    """

    rank: int = 0
    world_size: int = 1
    expert_ids: tuple[int, ...]
    tp_rank: int = 0
    tp_size: int = 1
    slice_size: int | None = None
    ranks: tuple[tuple[int, ...], ...] = ()
    spare: int = 0
    same_tokens: bool = False
    group: str = ""
    slice_group: str = ""

    def __post_init__(self) -> None:
        require(0 <= self.rank < self.world_size, "rank", self.rank, f"0 to {self.world_size - 1}")
        require(0 <= self.tp_rank < self.tp_size, "tp_rank", self.tp_rank, f"0 to {self.tp_size - 1}")
        for ids in (self.expert_ids, *self.ranks):
            require(len(set(ids)) == len(ids), "expert_ids", ids, "each id once")
        require(self.slice_size is None or self.slice_size >= 1, "slice_size", self.slice_size, "None, or at least 1")
        require(self.spare >= 0, "spare", self.spare, "0 or more slots")
        told = len(self.ranks)
        require(told in (0, self.world_size), "ranks", told, f"none, or one entry for each of {self.world_size} ranks")
        own = self.ranks[self.rank] if told else self.expert_ids
        require(own == self.expert_ids, f"ranks[{self.rank}]", own, f"expert_ids={self.expert_ids}")

    def __str__(self) -> str:
        """Return rank, experts and slice in words."""
        ids = list(self.expert_ids)
        whole = len(ids) > 2 and ids == list(range(ids[0], ids[0] + len(ids)))
        held = f"{ids[0]} to {ids[-1]}" if whole else ", ".join(map(str, ids)) or "none"
        part = f", slice {self.tp_rank} of {self.tp_size}" if self.tp_size > 1 else ""
        free = f", {self.spare} spare slots" if self.spare else ""
        same = ", the same tokens on every rank" if self.same_tokens else ""
        return f"rank {self.rank} of {self.world_size}, experts {held}{free}{part}{same}"

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups with which this rank shares layers, the one that splits experts first."""
        return (self.group,) * (self.world_size > 1) + (self.slice_group,) * (self.tp_size > 1)

    @property
    def width(self) -> int:
        """Slots of the rank that has most, this one where others are not told."""
        return max(map(len, self.ranks or (self.expert_ids,))) + self.spare
