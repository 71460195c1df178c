"""Placement: every expert has one owner, whatever the numbers."""

from __future__ import annotations

import pytest

from collegium.errors import InputError
from collegium.parallel.placement import linear, round_robin, tensor_parallel
from raising import raises_with


def test_linear_gives_the_first_ranks_one_more() -> None:
    ids = [linear(17, rank, 5).expert_ids for rank in range(5)]
    assert ids == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10), (11, 12, 13), (14, 15, 16)]
    assert linear(3, 4, 5).expert_ids == ()


def test_round_robin_deals_in_turn() -> None:
    assert [round_robin(7, rank, 3).expert_ids for rank in range(3)] == [(0, 3, 6), (1, 4), (2, 5)]


@pytest.mark.parametrize("make", [linear, round_robin])
@pytest.mark.parametrize(("experts", "world"), [(17, 5), (8, 8), (3, 8), (256, 6), (1, 1)])
def test_every_expert_has_one_owner(make, experts: int, world: int) -> None:
    placements = tuple(make(experts, rank, world) for rank in range(world))
    assert sorted(e for p in placements for e in p.expert_ids) == list(range(experts))
    assert [(p.rank, p.world_size) for p in placements] == [(rank, world) for rank in range(world)]


def test_tensor_parallel_holds_all_experts() -> None:
    placement = tensor_parallel(4, 1, 2)
    assert placement.expert_ids == (0, 1, 2, 3)
    assert (placement.tp_rank, placement.tp_size) == (1, 2)


def test_refusals() -> None:
    for make in (linear, round_robin, tensor_parallel):
        with raises_with(InputError, "4", "rank 2"):
            make(4, 2, 2)
