"""A policy's slots in the tables that dispatchers read: they are taken, and ranks get the load that was predicted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collegium.balance import POLICIES, rank_loads
from collegium.parallel.expert_map import ExpertMap
from collegium.placement import Placement


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize(("experts", "ranks", "spare"), [(16, 4, 2), (13, 3, 4), (9, 8, 1)])
def test_ranks_get_what_was_predicted(policy, experts, ranks, spare):
    rng, held = np.random.default_rng(experts), [tuple(range(rank, experts, ranks)) for rank in range(ranks)]
    placement = Placement(rank=0, world_size=ranks, expert_ids=held[0], ranks=tuple(held), spare=spare)
    table = ExpertMap(placement, experts, "cpu")
    chance = rng.pareto(1.0, experts) + 0.05
    ids = torch.from_numpy(rng.choice(experts, (20_000, 1), p=chance / chance.sum()))
    table.recording.fill_(1)
    table.record(ids)
    assert table.load.tolist() == np.bincount(ids.flatten(), minlength=experts).tolist()
    slots = policy.place(table.load, table.slots)
    assert slots != table.slots
    table.switch(slots)
    places = table.choose(ids).flatten()
    assert [slots[place // table.width][place % table.width] for place in places.tolist()] == ids.flatten().tolist()
    served = np.bincount(places // table.width, minlength=ranks)
    assert served == pytest.approx(rank_loads(table.load, slots), rel=0.05, abs=100)
