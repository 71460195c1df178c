"""What all dispatchers that send tokens between ranks have in common: what they refuse, check, keep and tell."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import torch

from ..errors import InputError
from ..ops.permute import permute
from .combine import reduced_combine
from .expert_map import ExpertMap
from .groups import check_ranks
from .local import Local, LocalKind
from .message_format import TokenMessage
from .partial import PartialKind, share
from .rendezvous import rendezvous_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..ops.permute import Permutation
    from ..placement import Placement
    from ..problem import Problem
    from ..runtime.memory import Regions
    from .combine import ReducedCombine

__all__ = ["Across", "AcrossKind", "by_rank", "checked_placement", "refuse_split", "said_of"]


def refuse_split(problem: Problem) -> str | None:
    """Return why experts cannot be split over the ranks of ``problem``, or None.

    Refused are one rank, placements that tell of no other rank, ranks without an expert, and experts that are nowhere.
    """
    placed = problem.placement
    if placed is None or placed.world_size == 1:
        return "asked for one rank; it exchanges tokens between ranks"
    if not placed.ranks:
        return f"asked for {placed} without Placement.ranks; it has to know what every rank holds"
    empty = [rank for rank, held in enumerate(placed.ranks) if not held]
    if empty:
        return f"asked for {problem.spec.num_experts} experts on {placed.world_size} ranks; rank {empty[0]} has none"
    missing = set(range(problem.spec.num_experts)).difference(*placed.ranks)
    if missing:
        return f"asked for ranks none of which holds experts {sorted(missing)[:8]}; each has to be somewhere"
    return None


def said_of(problem: Problem) -> dict[str, Any]:
    """Return by name what has to be the same on all ranks that share the layer of ``problem``."""
    spec = {each.name: getattr(problem.spec, each.name) for each in fields(problem.spec)}
    names = ("limits", "dtype", "activation_format", "combine", "sent_as")
    return spec | {name: getattr(problem, name) for name in names}


def checked_placement(name: str, problem: Problem) -> tuple[Placement, int]:
    """Return the placement and the number of the layer, once all ranks have agreed that they build the same one.

    All ranks ask at the same time. name: of the dispatcher. Raises InputError on every rank where torch.distributed has
    other ranks than the placement, or where the ranks were planned for different layers, and RankError where one does
    not come.
    """
    placed = problem.placement
    assert placed is not None
    check_ranks(name, placed)
    asked = said_of(problem) | {"ranks": placed.ranks, "spare": placed.spare}
    return placed, rendezvous_of(placed.group).build(asked, f"{name}: building a layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Across:
    """What a dispatcher over ranks keeps.

    inner: of what arrives, to the experts that are here. limit: the most tokens a rank may bring. group: name of the
    ranks' process group. number: of the layer, of those built over the group. reduced: None where each row comes back.
    """

    name: str
    inner: Local
    map: ExpertMap
    wire_format: TokenMessage
    reduced: ReducedCombine | None
    limit: int
    group: str
    number: int

    @classmethod
    def of(cls, name: str, problem: Problem, **own: Any) -> Self:
        """Return the dispatcher ``name`` of ``problem``; all ranks ask at the same time.

        Raises InputError on every rank where torch.distributed has other ranks than the placement, or where the ranks
        were planned for different layers.
        """
        placed, number = checked_placement(name, problem)
        return cls(
            name=name,
            inner=Local(num_experts=problem.slots, weight_on_input=problem.spec.routing.weight_on_input),
            map=ExpertMap(placed, problem.spec.num_experts, problem.device.place),
            wire_format=TokenMessage.of(problem),
            reduced=reduced_combine(problem),
            limit=problem.limits.max_tokens,
            group=placed.group,
            number=number,
            **own,
        )

    def rows(self, tokens: int, top_k: int) -> int:
        """Return this rank's share of the assignments of as many tokens on every rank."""
        return share(tokens * self.map.world_size * top_k, self.inner.num_experts, self.map.num_experts)

    def check(self) -> None:
        """Do nothing: whatever goes wrong is raised by the call."""

    def met(self, shape: tuple[int, ...], told: Any = None) -> list[tuple[int, int, Any]]:
        """Return what every rank brings to a call: the ``shape`` of its ids, and whatever else it tells.

        Raises InputError on every rank where one brings more than ``limit`` tokens or another top-k, or calls another
        layer, and RankError where one does not come.
        """
        table = rendezvous_of(self.group).exchange((*shape, self.number, told), f"{self.name} dispatch")
        if any(count > self.limit or (k, own) != (shape[1], self.number) for count, k, own, _ in table):
            said = "; ".join(
                f"rank {rank}: {count} tokens, top-{k}, layer {own}" for rank, (count, k, own, _) in enumerate(table)
            )
            raise InputError(
                f"{self.name}: every rank needs the same layer (numbered as they were built) and top-k and at most "
                f"max_tokens={self.limit} tokens, found {said}; call layers in the same order on every rank, plan for "
                "more tokens, or call with fewer on every rank"
            )
        return [(count, k, told) for count, k, _, told in table]


class AcrossKind:
    """What the rows of the table over ranks share: any backend of torch.distributed, over all of its ranks."""

    capturable = False
    collective = True
    symmetric = False

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Refuse what ``refuse_split`` does."""
        return refuse_split(problem)

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return this rank's share of the assignments of as many tokens on every rank."""
        return PartialKind().rows(problem, tokens * problem.world_size)

    def capacity(self, problem: Problem) -> int:
        """Return the assignments of ``max_tokens`` tokens on every rank: all may fall on this rank's experts."""
        return LocalKind().capacity(problem) * problem.world_size

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return none: sizes differ from call to call, so memory is torch's own."""
        return {}


def by_rank(places: Tensor, width: int, world: int) -> tuple[Tensor, Permutation]:
    """Return the rank of each assignment ``[T, K]``, and the tokens by the ranks they go to, each once a rank.

    places: ``[T, K]`` int64 of ``ExpertMap.choose``; negative ones are no rank and stay as they are. Of the
    permutation of ``[T, W]``, W being ``world``, column r is rank r; where a token does not go its slot is -1, or -2 if
    it has an id of nobody. Reads nothing on the host.
    """
    rank = torch.where(places < 0, places, places // width)
    every = torch.arange(world, device=places.device)
    goes = (rank[:, :, None] == every).any(dim=1)
    return rank, permute(torch.where(goes, every, rank.amin(dim=1, keepdim=True).clamp(max=-1)), world)
