"""Tokens go to the ranks of their experts, once each: the bits of one rank, room that is fixed, and reduced sums."""

from __future__ import annotations

from functools import partial

import pytest

from ranks import run_ranks
from split_layers import compare, disagree

BOTH = ("all_to_all", "all_to_all_fixed")


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_over_ranks_has_the_bits_of_one_layer(world: int) -> None:
    assert run_ranks(partial(compare, dispatchers=BOTH), world, seconds=300) == [[]] * world


@pytest.mark.parametrize("name", BOTH)
def test_ranks_that_disagree_are_told_so_on_every_rank(name: str) -> None:
    for errors in run_ranks(partial(disagree, name=name), 2):
        assert "found rank 0: 5 tokens, top-3; rank 1: 65 tokens, top-3" in errors[0]
        assert "rank 0: 2 tokens, top-2; rank 1: 2 tokens, top-3" in errors[1]
        assert f"{name}: building a layer: ranks 0 and 1 differ" in errors[2]
        assert "asked for rank 0 of 3, experts 0 to 2, torch.distributed has rank" in errors[3]
