from __future__ import annotations

from functools import partial

import pytest

from collegium import MoESpec, Overrides, Placement, PlanError, Problem, RoutingSpec, plan, probe
from collegium.parallel.placement import linear
from raising import assert_values
from ranks import run_ranks
from split_layers import compare, disagree


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_equal_one_layer(world: int) -> None:
    assert run_ranks(partial(compare, dispatchers=("all_gather",)), world, seconds=300) == [[]] * world


def test_disagreement_reported_on_every_rank() -> None:
    for errors in run_ranks(partial(disagree, name="all_gather"), 2):
        assert "rank 0: 5 tokens, top-3, layer 1; rank 1: 65 tokens, top-3, layer 1" in errors[0]
        assert "rank 0: 2 tokens, top-2, layer 1; rank 1: 2 tokens, top-3, layer 1" in errors[1]
        assert_values(errors[2], "all_gather", "ranks 0 and 1")
        assert_values(errors[3], "rank 0 of 3, experts 0 to 2", "torch.distributed")
        assert "rank 0: 4 tokens, top-3, layer 1; rank 1: 4 tokens, top-3, layer 2" in errors[4]


def test_unsplittable_placements_refused_by_name() -> None:
    spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=3, routing=RoutingSpec(top_k=2))

    def why(placement: Placement) -> str:
        with pytest.raises(PlanError) as error:
            plan(Problem(spec=spec, device=probe("cpu"), placement=placement))
        return str(error.value)

    assert_values(why(linear(3, 1, 4)), "3 experts", "4 ranks", "rank 3")
    nowhere = Placement(rank=0, world_size=2, expert_ids=(0, 1), ranks=((0, 1), (1,)))
    assert "experts [2]" in why(nowhere)
    assert "Placement.ranks" in why(Placement(rank=0, world_size=2, expert_ids=(0, 1)))
    made = plan(Problem(spec=spec, device=probe("cpu"), placement=linear(3, 1, 2)), Overrides(dispatcher="all_gather"))
    assert (made.dispatcher, made.capturable, made.capacity) == ("all_gather", False, 2 * 8192 * 2)
    assert "bf16" in made.wire_format
    assert made.wire_format in made.explain()
