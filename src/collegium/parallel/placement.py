"""Functions that create a ``Placement``, and select the experts of one; all pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ..errors import InputError
from ..placement import Placement
from ..types import ExpertWeights

if TYPE_CHECKING:
    from ..formats.payload import Payload

__all__ = ["expert_ids_of", "linear", "round_robin", "tensor_parallel", "wrap_around"]


def _check(num_experts: int, rank: int, world_size: int) -> None:
    if num_experts < 1 or world_size < 1 or not 0 <= rank < world_size:
        msg = (
            f"placement of {num_experts} experts for rank {rank} of {world_size} was requested; allowed are at least 1 "
            "expert, at least 1 rank and a rank below their number"
        )
        raise InputError(msg)


def linear(num_experts: int, rank: int = 0, world_size: int = 1) -> Placement:
    """Return consecutive experts for each rank; the first ``num_experts % world_size`` ranks hold one more.

    Raises InputError for a rank that does not exist.
    """
    _check(num_experts, rank, world_size)
    size, remainder = divmod(num_experts, world_size)
    starts = [r * size + min(r, remainder) for r in range(world_size + 1)]
    ranks = tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))
    return Placement(rank=rank, world_size=world_size, expert_ids=ranks[rank], ranks=ranks)


def round_robin(num_experts: int, rank: int = 0, world_size: int = 1) -> Placement:
    """Return every ``world_size``-th expert, from ``rank`` on. Raises InputError for a rank that does not exist."""
    _check(num_experts, rank, world_size)
    ranks = tuple(tuple(range(r, num_experts, world_size)) for r in range(world_size))
    return Placement(rank=rank, world_size=world_size, expert_ids=ranks[rank], ranks=ranks)


def wrap_around(num_experts: int, redundant: int, rank: int = 0, world_size: int = 1) -> Placement:
    """Return ``num_experts + redundant`` slots split over the ranks as by ``linear``; slot s holds expert s modulo E.

    The initial map of engines that balance experts. With enough redundant slots an expert is in several slots of a
    rank. Raises InputError for a rank that does not exist, a negative number of slots, and fewer slots than ranks.
    """
    _check(num_experts, rank, world_size)
    if redundant < 0 or num_experts + redundant < world_size:
        raise InputError(
            f"placement of {num_experts} experts with {redundant} redundant ones for {world_size} ranks was requested; "
            f"allowed are {max(0, world_size - num_experts)} or more, so that every rank has a slot"
        )
    slots = linear(num_experts + redundant, rank, world_size)
    ranks = tuple(tuple(slot % num_experts for slot in ids) for ids in slots.ranks)
    return Placement(rank=rank, world_size=world_size, expert_ids=ranks[rank], ranks=ranks)


def tensor_parallel(num_experts: int, tp_rank: int, tp_size: int) -> Placement:
    """Return all experts with slice ``tp_rank`` of ``tp_size`` of I. Raises InputError for a missing rank."""
    _check(num_experts, tp_rank, tp_size)
    ids = tuple(range(num_experts))
    return Placement(expert_ids=ids, ranks=(ids,), tp_rank=tp_rank, tp_size=tp_size)


def expert_ids_of(weights: ExpertWeights[Payload], expert_ids: tuple[int, ...]) -> ExpertWeights[Payload]:
    """Return the weights of ``expert_ids``, in that order."""
    ids = list(expert_ids)

    def rows(payload: Payload) -> Payload:
        tensors = {name: tensor[ids] for name, tensor in payload.tensors().items()}
        return replace(payload, shape=(len(ids), *payload.shape[1:]), **tensors)

    gate_up_bias = weights.gate_up_bias
    down_bias = weights.down_bias
    return replace(
        weights,
        gate_up=rows(weights.gate_up),
        down=rows(weights.down),
        gate_up_bias=None if gate_up_bias is None else gate_up_bias[ids],
        down_bias=None if down_bias is None else down_bias[ids],
    )
