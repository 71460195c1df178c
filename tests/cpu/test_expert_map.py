"""Where experts are: every assignment of an expert goes to one of its places, in turn; nobody's ids go nowhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from collegium import InputError, Placement
from collegium.parallel.expert_map import ExpertMap
from collegium.parallel.placement import linear

RANKS = ((0, 1, 2), (2, 3), (0, 2, 4))


def _map(rank: int, spare: int = 1) -> ExpertMap:
    return ExpertMap(Placement(rank=rank, world_size=3, expert_ids=RANKS[rank], ranks=RANKS, spare=spare), 5, "cpu")


def test_replicas_are_served_in_turn() -> None:
    for rank in range(3):
        own = _map(rank)
        assert own.width == 4
        ids = torch.tensor([[0, 1], [0, 2], [2, 4], [2, 3], [0, 2], [2, 0]])
        places = own.choose(ids)
        held = [e for slots in own.slots for e in slots]
        assert [[held[p] for p in row] for row in places.tolist()] == ids.tolist()
        turns = [sorted(p for p, e in enumerate(held) if e == 2).index(p) for p in places[ids == 2].tolist()]
        assert turns == [(t + rank) % 3 for t in (1, 2, 3, 4, 5)]
        # A later part of the same tokens goes where the whole batch sent it.
        assert torch.equal(own.choose(ids[2:], first=2), places[2:])
        assert torch.equal(_map(1).choose(ids, rank=rank), places)


def test_replica_columns_of_a_row() -> None:
    assert _map(0).physical_ids.shape == (5, 8)
    for experts, ranks, spare, most in ((8, 4, 0, 1), (7, 2, 0, 2), (8, 2, 1, 3), (8, 4, 2, 9), (1, 1, 0, 1)):
        maps = [ExpertMap(replace(linear(experts, rank, ranks), spare=spare), experts, "cpu") for rank in range(ranks)]
        assert {each.physical_ids.shape[1] for each in maps} == {most}, (experts, ranks, spare)
        ids = torch.arange(experts)[None]
        assert all(torch.equal(each.choose(ids, rank=0), maps[0].choose(ids)) for each in maps)


def test_replicas_on_one_rank() -> None:
    """Every slot of an expert is served in turn, also two on one rank."""
    ranks = ((0, 1, 0), (1, 1, 2))
    maps = [
        ExpertMap(Placement(rank=rank, world_size=2, expert_ids=ranks[rank], ranks=ranks), 3, "cpu") for rank in (0, 1)
    ]
    assert maps[0].replica_counts.tolist() == [2, 3, 1]
    ids = torch.tensor([[0], [0], [1], [1], [1], [2]])
    for rank, own in enumerate(maps):
        counts = [2, 2, 3, 3, 3, 1]
        slots = {0: [0, 2], 1: [1, 3, 4], 2: [5]}
        expected = [slots[int(e)][(t + rank) % c] for t, (e, c) in enumerate(zip(ids[:, 0], counts, strict=True))]
        assert own.choose(ids)[:, 0].tolist() == expected


def test_local_mask_follows_switches() -> None:
    own = _map(1)
    assert own.local_mask.tolist() == [0, 0, 1, 1, 0]
    assert own.local_mask.tolist() == list(Placement(expert_ids=RANKS[1]).mask(5))
    mask = own.local_mask
    own.switch(((0, 1, 2, 3), (4, 0, 0, -1), (0, 2, 4, -1)))
    assert own.local_mask is mask
    assert mask.tolist() == [1, 0, 0, 0, 1]


def test_ids_of_nobody_have_no_place() -> None:
    own = _map(1)
    places = own.choose(torch.tensor([[-1, 5, -7, 3]], dtype=torch.int32))
    assert places.tolist() == [[-1, -2, -2, own.width + 1]]
    assert own.local(places).tolist() == [[-1, own.width, own.width, 1]]


def test_switch_updates_tensors_in_place() -> None:
    own = _map(0)
    tensors = own.physical_ids, own.replica_counts
    slots = [list(each) for each in own.slots]
    slots[1][2] = 4
    own.switch(tuple(map(tuple, slots)))
    assert own.physical_ids is tensors[0]
    assert own.replica_counts is tensors[1]
    assert own.replica_counts.tolist() == [2, 1, 3, 1, 2]
    assert own.choose(torch.tensor([[4], [4]])).tolist() == [[1 * 4 + 2], [2 * 4 + 2]]


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        (((0, 1, 2, -1), (2, 3, -1, -1), (0, 2, -1, -1)), r"experts \[4\] are on no rank"),
        (((0, 1, 2, -1), (2, 3, -1, 9), (0, 2, 4, -1)), "rank 1 has"),
        (((0, 1, 2), (2, 3), (0, 2, 4)), r"found slots \[3, 2, 3\], allowed: 4 for 3 ranks"),
    ],
)
def test_maps_that_lose_experts_are_refused(slots, said: str) -> None:
    own = _map(0)
    before = own.slots, own.physical_ids.clone(), own.replica_counts.clone()
    with pytest.raises(InputError, match=said):
        own.switch(slots)
    assert own.slots == before[0]
    assert torch.equal(own.physical_ids, before[1])
    assert torch.equal(own.replica_counts, before[2])


def test_load_is_counted_only_while_recording() -> None:
    own = _map(2)
    ids = torch.tensor([[0, 4], [-1, 4], [7, 1]])
    own.record(ids)
    assert own.load.tolist() == [0] * 5
    own.recording.fill_(1)
    own.record(ids)
    own.record(ids)
    assert own.load.tolist() == [2, 2, 0, 0, 4]
