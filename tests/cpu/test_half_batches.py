"""Two halves of a batch at the same time: two layers over the same ranks, one set of packed experts, two threads."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import distributed

from collegium import Choice, plan
from collegium.parallel.placement import linear
from collegium.testing.compare import heavy_tailed
from ranks import run_ranks
from split_layers import DTYPES, EXPERTS, HIDDEN, RECIPES, equal, layer_of


def _halves(rank: int, name: str) -> list[str]:
    """Return what differs from one layer that has every expert and is given the whole batch."""
    world, faults = distributed.get_world_size(), list[str]()
    groups = [distributed.new_group(list(range(world))).group_name for _ in range(2)]
    for kind, recipe in (("shared", RECIPES[1]), ("plain", RECIPES[0]), ("latent", RECIPES[2])):
        whole = layer_of(kind, recipe, "cpu")
        placed = replace(linear(EXPERTS, rank, world), group=groups[0])
        one = layer_of(kind, recipe, "cpu", placed, dispatcher=name)
        two = copy.copy(one)
        asked = replace(one.plan.problem, placement=replace(placed, group=groups[1]))
        two.replan(plan(asked, Choice(dispatcher=name)), one.experts)
        assert two.experts is one.experts
        with ThreadPoolExecutor(2) as pool:
            for turn in range(3):
                x = heavy_tailed(6 + rank, HIDDEN, seed=10 * turn + rank).to(DTYPES[recipe[2]])
                halves = [pool.submit(layer, half) for layer, half in zip((one, two), x.tensor_split(2), strict=True)]
                found = torch.cat([half.result() for half in halves])
                if not equal(found, whole(x), exact=False):
                    faults.append(f"{kind} {recipe}, turn {turn}")
    return faults


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "all_to_all_fixed", "symm_mem"])
def test_halves_of_a_batch_run_beside_each_other_over_groups_of_their_own(name: str) -> None:
    assert run_ranks(partial(_halves, name=name), 2) == [[], []]
