from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from collegium import DeviceFacts, MoESpec, Plan, Problem, RoutingSpec, plan, probe
from collegium.parallel.placement import linear
from peer_kernels import exchange, lose, refused
from ranks import run_ranks
from split_layers import absent, compare, disagree


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_over_ranks_has_the_bits_of_one_layer(world: int) -> None:
    assert run_ranks(partial(compare, dispatchers=("symm_mem",)), world, seconds=300) == [[]] * world


@pytest.mark.parametrize("world", [2, 4])
def test_kernels_exchange_what_torch_does(world: int) -> None:
    assert run_ranks(exchange, world, seconds=300) == [[]] * world


def test_a_rank_that_does_not_come_is_named_and_nobody_gets_a_number() -> None:
    first, last = run_ranks(lose, 2)
    assert first[0] == last[0] == "all NaN True"
    assert first[1].startswith("symm_mem dispatch; ranks (1,); symm_mem dispatch on rank 0: rank 1 did not come within")
    assert last[1].startswith("symm_mem combine; ranks (0,); symm_mem combine on rank 1: rank 0 gave up before")
    assert first[2] == last[2] == "renewed True"


def test_everybody_names_the_rank_that_was_waited_for_first() -> None:
    found = run_ranks(absent, 3)
    for errors, took, renewed in found[:2]:
        assert [ranks for ranks, *_ in errors] == [(2,)] * 2
        assert [phase for _, phase, _ in errors] == ["symm_mem dispatch"] * 2
        assert took < 5, "whoever waits longer is told by the one that gave up"
        assert renewed
    assert "rank 2 did not come within 1 s" in found[0][0][0][2]
    errors, took, renewed = found[2]
    assert [ranks for ranks, *_ in errors] == [(0,)] * 2, "the rank that came late is told who went on without it"
    assert took < 1
    assert renewed


def test_ranks_that_disagree_are_told_so_on_every_rank() -> None:
    for errors in run_ranks(partial(disagree, name="symm_mem"), 2):
        assert "found rank 0: 5 tokens, top-3, layer 0; rank 1: 65 tokens, top-3, layer 0" in errors[0]
        assert "rank 0: 2 tokens, top-2, layer 0; rank 1: 2 tokens, top-3, layer 0" in errors[1]
        assert "symm_mem: building a layer" in errors[2]
        assert "asked for rank 0 of 3, experts 0 to 2" in errors[3]


def test_what_it_cannot_serve_is_refused_by_name() -> None:
    spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=8, routing=RoutingSpec(top_k=2))
    gpu = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30, peers=2)

    def planned(device: DeviceFacts, world: int, **changes: Any) -> Plan:
        placed = replace(linear(8, 1, world), **changes)
        return plan(Problem(spec=spec, device=device, placement=placed))

    chosen = planned(gpu, 2)
    assert (chosen.dispatcher, chosen.capturable) == ("symm_mem", True)
    assert "tokens in bf16 once to each rank of their experts, a row for each assignment back" in chosen.explain()

    def why(made: Plan) -> str:
        assert made.dispatcher != "symm_mem"
        return next(refusal.reason for refusal in made.refusals if refusal.name == "symm_mem")

    assert "asked for 4 ranks; 2 GPUs of this host reach each other's memory" in why(planned(gpu, 4))
    assert planned(replace(gpu, peers=None), 4).dispatcher == "symm_mem", "a laptop plans for other machines"
    assert "it is for GPUs that read each other's memory" in why(planned(probe("cpu"), 2))
    assert planned(gpu, 2, same_tokens=True).dispatcher == "symm_mem", "shares of the same tokens too"
    uneven = [
        {
            r.name: r.nbytes
            for r in plan(Problem(spec=replace(spec, num_experts=7), device=gpu, placement=linear(7, rank, 2))).regions
        }
        for rank in range(2)
    ]
    assert uneven[0] == uneven[1], "one map of memory, whatever each rank holds"


def test_memory_that_cannot_be_shared_is_said_on_every_rank() -> None:
    for error in run_ranks(refused, 2):
        assert error.startswith("symm_mem: ")
        assert "found rank 1: the driver says no" in error
        assert "Choice(dispatcher='all_gather')" in error
