"""Tokens go to the ranks of their experts, once each: the bits of one rank, and room that is fixed."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from collegium import (
    DeviceFacts,
    Limits,
    MoESpec,
    Overrides,
    Placement,
    PlanError,
    Problem,
    RankError,
    Routing,
    RoutingSpec,
    encode_experts,
    plan,
    probe,
)
from collegium.experts import KERNELS
from collegium.parallel import DISPATCHERS, Local
from collegium.parallel.placement import linear
from collegium.parallel.rendezvous import timeout_seconds
from collegium.pipelines import PipelineParts
from collegium.pipelines.split import Split
from collegium.runtime.memory import Region, Workspace, memory_map
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from raising import assert_values, raises_with
from ranks import error_of, run_ranks
from split_layers import EXPERTS, HIDDEN, RECIPES, compare, disagree, layer_of, replicated, taken

BOTH = ("all_to_all", "all_to_all_fixed")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_equal_one_layer(world: int) -> None:
    assert run_ranks(partial(compare, dispatchers=BOTH), world, seconds=300) == [[]] * world


@pytest.mark.parametrize("name", BOTH)
def test_disagreement_reported_on_every_rank(name: str) -> None:
    for errors in run_ranks(partial(disagree, name=name), 2):
        assert "rank 0: 5 tokens, top-3, layer 1; rank 1: 65 tokens, top-3, layer 1" in errors[0]
        assert "rank 0: 2 tokens, top-2, layer 1; rank 1: 2 tokens, top-3, layer 1" in errors[1]
        assert_values(errors[2], name, "ranks 0 and 1")
        assert_values(errors[3], "rank 0 of 3, experts 0 to 2", "torch.distributed")
        assert "rank 0: 4 tokens, top-3, layer 1; rank 1: 4 tokens, top-3, layer 2" in errors[4]


ROOM = 4
CAPTURED = "collegium.parallel.all_to_all_fixed.is_capturing"


def _to(ranks: list[list[int]], *, world: int) -> torch.Tensor:
    """Return ``[T, 3]`` ids of which token t has one on each of ``ranks[t]``, and -1 for the rest."""
    first = [linear(EXPERTS, r, world).expert_ids[0] for r in range(world)]
    rows = [[first[r] for r in own] + [-1] * (3 - len(own)) for own in ranks]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 3)


def _room(rank: int) -> Any:
    world, said, faults = distributed.get_world_size(), list[str](), list[str]()
    whole = layer_of("plain", RECIPES[1], "cpu")
    place = linear(EXPERTS, rank, world)
    layer = layer_of("plain", RECIPES[1], "cpu", place, dispatcher="all_to_all_fixed", room=ROOM)
    # Rank 1 has six tokens for rank 0, two of which find no room; the others have as many as fit, or none.
    fits = [[0], [0], [1, 0], [1], [], [1, 0]]
    more = [*fits, [0, 1], [2], [0]]
    lost = [6, 8]

    def bring(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = heavy_tailed(len(ids), HIDDEN, seed=rank + 1)
        routing = Routing(topk_ids=ids, topk_weights=torch.full(ids.shape, 0.4))
        return layer(x, routing=routing), whole(x, routing=routing)

    own = more if rank == 1 else fits if rank == 0 else []
    found, wanted = bring(_to(fits, world=world))
    # The library of the CPU rounds one row of an expert otherwise than several.
    if not torch.allclose(found, wanted, rtol=1e-5, atol=1e-6):
        faults.append("what just fits")
    said.append(error_of(lambda: bring(_to(own, world=world))))
    for after in (lambda: bring(_to([], world=world)), layer.check):
        with patch(CAPTURED, lambda device: True):
            found, wanted = bring(_to(own, world=world))
        kept = [t for t in range(len(own)) if rank != 1 or t not in lost]
        if not torch.allclose(found[kept], wanted[kept], rtol=1e-5, atol=1e-6):
            faults.append("a token that has room")
        if rank == 1 and not bool(found[lost].isnan().all()):
            faults.append("a token without room has a row")
        said += [error_of(after), error_of(after)]
    return said, faults


def test_over_capacity_raises_on_every_rank() -> None:
    for said, faults in run_ranks(_room, 3):
        assert faults == []
        assert "rank_tokens=4" in said[0]
        assert "rank 0: 4; rank 1: 6; rank 2: 0" in said[0]
        for late in (said[1], said[3]):
            assert_values(late, "CUDA graph", "NaN", "rank 1: 2")
        assert said[2] == said[4] == "none"


def _gone(rank: int) -> Any:
    layer = layer_of("plain", RECIPES[1], "cpu", linear(EXPERTS, rank, 3), dispatcher="all_to_all_fixed")
    timeout_seconds(2.0)
    started = time.monotonic()
    if rank == 2:
        return None
    try:
        layer(torch.ones(3, HIDDEN))
    except RankError as error:
        return error.ranks, error.phase, time.monotonic() - started
    return None


def test_silent_ranks_are_named_in_time() -> None:
    for ranks, phase, seconds in run_ranks(_gone, 3)[:2]:
        assert (ranks, phase) == ((2,), "all_to_all_fixed dispatch")
        assert 1.9 <= seconds < 8


def _planned(rank: int) -> list[str]:
    """Return what differs in passes whose messages are in the memory that the plan declares, which is poisoned."""
    world, faults = distributed.get_world_size(), list[str]()
    for combine, recipe in product(("exact", "reduced", "reduced_fp8"), RECIPES):
        place = replicated(EXPERTS, rank, world)
        layer = layer_of("plain", recipe, "cpu", place, dispatcher="all_to_all_fixed", combine=combine, room=9)
        space = Workspace(torch.device("cpu"), layer.plan.workspace_bytes)
        space.block.fill_(255)
        memory = space.memory(memory_map(layer.plan.regions))
        for tokens in (9, 4, 0):
            x = heavy_tailed(tokens, HIDDEN, seed=tokens + rank).to(layer.input_dtype)
            out = torch.empty_like(x)
            layer.compute((x, None, None, None, None, None, None, out), memory)
            if not torch.equal(out, layer(x)) or bool(out.isnan().any()):
                faults.append(f"{combine} {recipe} {tokens}")
        # What is declared is what is taken: a message less and it raises.
        short = tuple(
            Region(n, size - 1 if n in ("sent", "received", "returned") else size) for n, size in layer.plan.regions
        )
        try:
            layer.compute((x, None, None, None, None, None, None, out), space.memory(memory_map(short)))
            faults.append(f"{combine} {recipe}: more was declared than taken")
        except AssertionError:
            pass
    return faults


def test_messages_use_planned_memory() -> None:
    assert run_ranks(_planned, 2) == [[], []]


def _codes(rank: int) -> list[str]:
    """Return what differs where the experts are kernels for GPUs, which Triton interprets, and codes travel."""
    world, faults = distributed.get_world_size(), list[str]()
    for weights, act in (("mxfp4", "fp8_token"), ("fp8_block", "fp8_group128")):
        spec = MoESpec(
            hidden_size=176, intermediate_size=90, num_experts=5, routing=RoutingSpec(top_k=2), weight_format=weights
        )
        asked = Problem(
            spec=spec,
            device=DeviceFacts(kind="cuda", capability=(9, 0)),
            activation_format=act,
            limits=Limits(max_tokens=9),
        )
        plain = encode_experts(random_experts(5, 2, 90, 176, seed=1), weights)
        kernel = next(k for k in KERNELS if k.refuse(asked.routed) is None)
        parts = PipelineParts(
            experts=kernel.pack(plain, asked.routed), dispatcher=Local(num_experts=5), top_k=2, num_experts=5
        )
        counts = [3, 9]
        x = heavy_tailed(sum(counts), 176, seed=3).bfloat16()
        ids, given = uneven_ids(sum(counts), 2, 5, seed=2), torch.rand(sum(counts), 2)
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        wanted = Split(parts=parts)(x, Routing(topk_ids=ids, topk_weights=given), dtype=x.dtype)[own]
        # Replicas too: a row has the same bits on every rank, whatever rows are beside it.
        placed = replace(replicated(5, rank, world), spare=0)
        split = replace(asked, placement=placed)
        made = plan(split, Overrides(kernel=kernel.name))
        assert made.problem.sent_as == act
        packed = kernel.pack(taken(plain, placed.expert_ids), split.routed)
        for kind in DISPATCHERS:
            if kind.name not in (*BOTH, "all_gather"):
                continue
            dispatcher = kind.build(replace(made.problem, device=probe("cpu")))
            here = Split(parts=replace(parts, experts=packed, dispatcher=dispatcher))
            found = here(x[own], Routing(topk_ids=ids[own], topk_weights=given[own]), dtype=x.dtype)
            if not torch.equal(found, wanted):
                faults.append(f"{kind.name} {weights} {act}")
    return faults


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu makes these comparisons on the device")
def test_codes_over_ranks_equal_one_rank() -> None:
    pytest.importorskip("triton")
    assert run_ranks(_codes, 2, seconds=300) == [[], []]


def _asked(placement: Placement | None, **others: Any) -> Problem:
    spec = MoESpec(hidden_size=256, intermediate_size=256, num_experts=8, routing=RoutingSpec(top_k=2))
    device = DeviceFacts(kind="cuda", capability=(9, 0), peers=1)  # as where every rank is on a host of its own
    return Problem(spec=spec, device=device, placement=placement, **others)


def test_plans_describe_wire_and_capture() -> None:
    placed = linear(8, 1, 4)
    made = plan(_asked(placed))
    assert (made.dispatcher, made.capturable, made.capacity) == ("all_to_all", False, 4 * 2 * 8192)
    assert "bf16" in made.wire_format
    assert made.wire_format in made.explain()
    made = plan(_asked(placed, graph=True, limits=Limits(max_tokens=100, rank_tokens=30)))
    assert (made.dispatcher, made.capturable, made.capacity) == ("all_to_all_fixed", True, 4 * 2 * 30)
    assert_values(made.explain(), "30")
    assert "all_to_all: graph=True" in made.explain()
    sizes = {region.name: region.nbytes for region in made.regions}
    # 256 columns of two bytes and two places, in whole 64 bytes.
    assert sizes["sent"] == sizes["received"] == 4 * 30 * 576
    assert sizes["returned"] == 4 * 30 * 2 * 256 * 4
    made = plan(_asked(placed), Overrides(combine="reduced"))
    assert made.problem.combine == "reduced"
    assert_values(made.explain(), "reduced", "bf16")
    made = plan(_asked(placed, combine="reduced"), Overrides(combine="reduced_fp8", dispatcher="all_to_all_fixed"))
    assert_values(made.wire_format, "fp8_group128", "1/16")


def test_what_cannot_be_is_refused() -> None:
    with raises_with(PlanError, "local", "reduced"):
        plan(_asked(None), Overrides(combine="reduced"))
    with raises_with(PlanError, "all_to_all"):
        plan(_asked(None), Overrides(dispatcher="all_to_all"))
    wrong: Any = "averaged"
    with raises_with(ValueError, "combine", "'averaged'", "reduced_fp8", "exact"):
        plan(_asked(linear(8, 0, 2)), Overrides(combine=wrong))
    for room in (0, 101):
        with raises_with(ValueError, "rank_tokens", room, "None", "max_tokens=100"):
            Limits(max_tokens=100, rank_tokens=room)
