"""Base of the dispatchers that send tokens between ranks with collectives: what they refuse, check and hold."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

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

__all__ = [
    "ExpertParallel",
    "ExpertParallelKind",
    "RankCounts",
    "layer_settings",
    "number_layer",
    "permute_by_rank",
    "refuse_split",
]


def refuse_split(problem: Problem) -> str | None:
    """Return why experts cannot be split over the ranks of ``problem``, or None.

    Refused are a single rank, placements without the experts of other ranks, ranks without experts, and experts that no
    rank holds.
    """
    placement = problem.placement
    if placement is None or placement.world_size == 1:
        return "the plan is for one rank; it exchanges tokens between ranks"
    if not placement.ranks:
        return f"Placement.ranks is missing for {placement}; it needs the experts of every rank"
    empty = [rank for rank, ids in enumerate(placement.ranks) if not ids]
    if empty:
        return f"{problem.spec.num_experts} experts on {placement.world_size} ranks: rank {empty[0]} has none"
    missing = set(range(problem.spec.num_experts)).difference(*placement.ranks)
    if missing:
        return f"no rank holds experts {sorted(missing)[:8]}; every expert needs a rank"
    return None


def layer_settings(problem: Problem) -> dict[str, Any]:
    """Return, by name, the settings that all ranks of a layer must have in common."""
    settings = {field.name: getattr(problem.spec, field.name) for field in fields(problem.spec)}
    for name in ("limits", "dtype", "output_dtype", "activation_format", "combine", "sent_as"):
        settings[name] = getattr(problem, name)
    return settings


def number_layer(name: str, problem: Problem) -> tuple[Placement, int]:
    """Return the placement of ``problem`` and the number of its layer; all ranks build layers in the same order.

    name: of the dispatcher. Raises InputError where torch.distributed has other ranks than the placement.
    """
    placement = problem.placement
    assert placement is not None
    check_ranks(name, placement)
    return placement, rendezvous_of(placement.group).number_layer()


class RankCounts(NamedTuple):
    """What one rank brings to a pass. extra: further counts, as the dispatcher needs them."""

    tokens: int
    top_k: int
    extra: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallel:
    """Base of dispatchers that send tokens to the ranks of their experts.

    inner: sorts received tokens by local expert. limit: maximum number of tokens of a rank. group: name of the ranks'
    process group. number: of the layer, among those built over the group. reduced: None where each row returns.
    """

    name: str
    inner: Local
    expert_map: ExpertMap
    message: TokenMessage
    reduced: ReducedCombine | None
    limit: int
    group: str
    number: int

    @classmethod
    def of(cls, name: str, problem: Problem, **extra: Any) -> Self:
        """Return the dispatcher ``name`` of ``problem``; all ranks call it together.

        extra: fields of the subclass. Raises as ``number_layer`` does.
        """
        placement, number = number_layer(name, problem)
        return cls(
            name=name,
            inner=Local(num_experts=problem.slots, weight_on_input=problem.spec.routing.weight_on_input),
            expert_map=ExpertMap(placement, problem.spec.num_experts, problem.device.place),
            message=TokenMessage.of(problem),
            reduced=reduced_combine(problem),
            limit=problem.limits.max_tokens,
            group=placement.group,
            number=number,
            **extra,
        )

    def rows(self, tokens: int, top_k: int) -> int:
        """Return this rank's share of the assignments of ``tokens`` tokens on every rank."""
        assignments = tokens * self.expert_map.world_size * top_k
        return share(assignments, self.inner.num_experts, self.expert_map.num_experts)

    def for_halves(self) -> Self:
        """Return this dispatcher."""
        return self

    def check(self) -> None:
        """Do nothing: passes raise their errors themselves."""

    def exchange_counts(self, shape: tuple[int, ...], extra: Any = None) -> list[RankCounts]:
        """Exchange the ``shape [T, K]`` of this rank's ids and ``extra`` counts; return those of every rank.

        Raises InputError on every rank where one has more than ``limit`` tokens or another top-k, or calls another
        layer, and RankError where a rank does not respond.
        """
        table = rendezvous_of(self.group).exchange((*shape, self.number, extra), f"{self.name} dispatch")
        expected = (shape[1], self.number)
        if any(tokens > self.limit or (top_k, layer) != expected for tokens, top_k, layer, _ in table):
            brought = "; ".join(
                f"rank {rank}: {tokens} tokens, top-{top_k}, layer {layer}"
                for rank, (tokens, top_k, layer, _) in enumerate(table)
            )
            raise InputError(
                f"{self.name}: every rank needs the same layer (numbered as they were built) and top-k and at most "
                f"max_tokens={self.limit} tokens, found {brought}; call layers in the same order on every rank, plan "
                "for more tokens, or call with fewer on every rank"
            )
        return [RankCounts(tokens, top_k, counts) for tokens, top_k, _, counts in table]


class ExpertParallelKind:
    """Base of the kinds of ``ExpertParallel`` dispatchers; works with any backend of torch.distributed."""

    capturable = False
    collective = True
    symmetric = False
    partial_sums = False
    overlaps = "return"
    no_half_batches = ""
    fixed_messages = False

    def refuse(self, problem: Problem, *, requested: bool) -> str | None:
        """Refuse what ``refuse_split`` refuses."""
        return refuse_split(problem)

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return this rank's share of the assignments of ``tokens`` tokens on every rank."""
        return PartialKind().rows(problem, tokens * problem.world_size)

    def capacity(self, problem: Problem) -> int:
        """Return the number of assignments of ``max_tokens`` tokens on every rank: all may fall on this rank."""
        return LocalKind().capacity(problem) * problem.world_size

    def batch_tokens(self, problem: Problem) -> int:
        """Return ``max_tokens`` tokens of every rank."""
        return problem.limits.max_tokens * problem.world_size

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return none: sizes differ between passes, so torch allocates."""
        return {}


def permute_by_rank(physical_ids: Tensor, width: int, world: int) -> tuple[Tensor, Permutation]:
    """Return the rank of each assignment ``[T, K]``, and the permutation of tokens by destination rank.

    physical_ids: ``[T, K]`` int64 of ``ExpertMap.choose``; negative ones stay as they are. The permutation is over
    ``[T, W]``, with W = ``world`` and a column for each rank: a token occurs once for each rank that has one of its
    experts; for other ranks its slot is -1, or -2 if it has an invalid id. Does not wait for the device.
    """
    rank = torch.where(physical_ids < 0, physical_ids, physical_ids // width)
    ranks = torch.arange(world, device=physical_ids.device)
    is_sent = (rank[:, :, None] == ranks).any(dim=1)
    fallback = rank.amin(dim=1, keepdim=True).clamp(max=-1)
    return rank, permute(torch.where(is_sent, ranks, fallback), world)
