"""Which experts one of several ranks holds, and which slice of them."""

from dataclasses import dataclass

from .types import require

__all__ = ["Placement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The experts of one rank, and its slice of their intermediate width.

    rank, world_size: among the ranks that split the experts. expert_ids: logical ids of the local experts in the order
    of local slots; an expert may be on several ranks and in several slots of a rank. spare: empty slots after those.
    tp_rank, tp_size: the local slice of I: rows of gate and up, columns of down.
    slice_size: rows of the slice; None: I / tp_size, rounded up. Slices that are padded to whole groups have more.
    ranks: the experts of every rank, in the order of ranks, for dispatchers that send tokens to others; empty: unknown.
    same_tokens: all ranks are called with the same tokens and each serves a share of them; otherwise every rank is
    called with different tokens.
    group, slice_group: names of the process groups of the ranks that split the experts, and of the ranks that hold the
    slices of the same experts; empty: torch's default group.
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
        require(self.slice_size is None or self.slice_size >= 1, "slice_size", self.slice_size, "None, or at least 1")
        require(self.spare >= 0, "spare", self.spare, "0 or more slots")
        entries = len(self.ranks)
        allowed = f"none, or one entry for each of {self.world_size} ranks"
        require(entries in (0, self.world_size), "ranks", entries, allowed)
        if self.ranks:
            ids = self.ranks[self.rank]
            require(ids == self.expert_ids, f"ranks[{self.rank}]", ids, f"expert_ids={self.expert_ids}")

    def __str__(self) -> str:
        """Return rank, experts and slice as text."""
        text = f"rank {self.rank} of {self.world_size}, experts {_compressed(self.expert_ids)}"
        if self.spare:
            text += f", {self.spare} spare slots"
        if self.tp_size > 1:
            text += f", slice {self.tp_rank} of {self.tp_size}"
        if self.same_tokens:
            text += ", the same tokens on every rank"
        return text

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups whose ranks call the layer together, the one that splits experts first."""
        return (self.group,) * (self.world_size > 1) + (self.slice_group,) * (self.tp_size > 1)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, and has the first slice."""
        return self.rank == 0 and self.tp_rank == 0

    @property
    def width(self) -> int:
        """Slots of the rank with the most; of this rank where the others are unknown."""
        return max(map(len, self.ranks or (self.expert_ids,))) + self.spare

    def mask(self, num_experts: int) -> tuple[int, ...]:
        """Return 1 for each logical expert that this rank holds, otherwise 0; ``[num_experts]``."""
        local = frozenset(self.expert_ids)
        return tuple(int(expert in local) for expert in range(num_experts))


def _compressed(ids: tuple[int, ...]) -> str:
    """Return ids as text, three or more with equal steps as a range: ``0 to 3, 8, 12 to 60 in steps of 4``."""
    parts: list[str] = []
    start = 0
    while start < len(ids):
        stop = start + 1
        step = ids[stop] - ids[start] if stop < len(ids) else 0
        while stop < len(ids) and step > 0 and ids[stop] - ids[stop - 1] == step:
            stop += 1
        if stop - start < 3:
            parts.append(str(ids[start]))
            start += 1
            continue
        steps = "" if step == 1 else f" in steps of {step}"
        parts.append(f"{ids[start]} to {ids[stop - 1]}{steps}")
        start = stop
    return ", ".join(parts) or "none"
