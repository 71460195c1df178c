"""Placement: every expert has one owner, whatever the numbers."""

from __future__ import annotations

import pytest

from collegium import Placement
from collegium.errors import InputError
from collegium.parallel.placement import linear, round_robin, tensor_parallel, wrap_around
from raising import raises_with


def test_linear_gives_remainder_to_first_ranks() -> None:
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


def test_wrap_around_repeats_experts() -> None:
    assert [wrap_around(4, 2, rank, 2).expert_ids for rank in (0, 1)] == [(0, 1, 2), (3, 0, 1)]
    assert [wrap_around(3, 6, rank, 2).expert_ids for rank in (0, 1)] == [(0, 1, 2, 0, 1), (2, 0, 1, 2)]
    assert wrap_around(4, 0, 1, 2) == linear(4, 1, 2)
    assert wrap_around(2, 2, 3, 4).expert_ids == (1,)


@pytest.mark.parametrize(("experts", "redundant", "world"), [(4, -1, 2), (4, 3, 8)])
def test_wrap_around_refusals(experts: int, redundant: int, world: int) -> None:
    with raises_with(InputError, experts, redundant, world):
        wrap_around(experts, redundant, 0, world)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ((), "none"),
        ((3,), "3"),
        ((3, 4), "3, 4"),
        ((0, 1, 2, 3), "0 to 3"),
        ((0, 4, 8, 12), "0 to 12 in steps of 4"),
        ((0, 1, 2, 7, 10, 13, 16, 2), "0 to 2, 7 to 16 in steps of 3, 2"),
        ((5, 4, 3, 3, 3), "5, 4, 3, 3, 3"),
    ],
)
def test_ids_as_text(ids: tuple[int, ...], text: str) -> None:
    assert str(Placement(expert_ids=ids)) == f"rank 0 of 1, experts {text}"


def test_tensor_parallel_holds_all_experts() -> None:
    placement = tensor_parallel(4, 1, 2)
    assert placement.expert_ids == (0, 1, 2, 3)
    assert (placement.tp_rank, placement.tp_size) == (1, 2)


def test_placement_refuses_ranks() -> None:
    for make in (linear, round_robin, tensor_parallel):
        with raises_with(InputError, "4", "rank 2"):
            make(4, 2, 2)
