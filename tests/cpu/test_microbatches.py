"""``Overrides(microbatches=2)``: a batch runs as two halves, of which one travels while the experts run the other."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from collegium import (
    DeviceFacts,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Placement,
    PlanError,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SpecError,
    expert_weights,
    plan,
    probe,
)
from collegium.parallel import collectives
from collegium.parallel.collectives import PendingRows
from collegium.parallel.placement import linear, tensor_parallel
from collegium.parallel.rendezvous import timeout_seconds
from collegium.pipelines import half_batches
from collegium.planning import plan_swap
from collegium.stages.shared import SharedExpert
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from microbatches import MAX_TOKENS, compare_halves
from raising import assert_values, raises_with
from ranks import error_of, run_ranks
from split_layers import EXPERTS, HIDDEN, RECIPES, kept, layer_of
from watching import watch

DISPATCHERS = ("all_to_all", "all_gather", "all_to_all_fixed")
HALVES = Overrides(microbatches=2, allow_slow=True)


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("world", [2, 4])
def test_halves_equal_whole_batches(name: str, world: int) -> None:
    assert run_ranks(partial(compare_halves, name=name), world, seconds=300) == [[]] * world


def _events(layer: MoELayer, x: torch.Tensor) -> list[str]:
    """Return the order in which exchanges start and end, and experts run."""
    events: list[str] = []
    with (
        watch(events, collectives, "_start", "start"),
        watch(events, PendingRows, "wait", "wait"),
        watch(events, half_batches, "run_experts", "experts"),
        watch(events, SharedExpert, "__call__", "shared"),
    ):
        layer(x)
    return events


def _orders(rank: int) -> list[list[str]]:
    found: list[list[str]] = []
    for name in DISPATCHERS:
        for mode in (None, "sequential"):
            placement = linear(EXPERTS, rank, distributed.get_world_size())
            options = {
                "dispatcher": name,
                "shared": mode,
                "microbatches": 2,
                "allow_slow": True,
                "max_tokens": MAX_TOKENS,
            }
            layer = layer_of("shared", RECIPES[1], "cpu", placement, **options)
            kept.append(layer)
            found.append(_events(layer, heavy_tailed(8, HIDDEN, seed=rank)))
    return found


def test_exchange_order_of_halves() -> None:
    dispatches = ["start", "wait", "experts", "start", "wait"]
    # The first half's rows are on their way before the experts run the second half.
    expected = [*dispatches, "start", "experts", "start", "shared", "wait", "wait"]
    assert run_ranks(_orders, 2) == [[expected] * 2 * len(DISPATCHERS)] * 2


def _sliced(rank: int) -> list[float]:
    """Return the errors of halves and whole batches of ranks that split experts and their widths."""
    experts = random_experts(8, 2, 64, 64, seed=1)
    expert_rank, slice_rank = divmod(rank, 2)
    groups = [[getattr(distributed.new_group(members), "group_name", "") for members in pairs] for pairs in PAIRS]
    spec = MoESpec(
        hidden_size=64, intermediate_size=64, num_experts=8, routing=RoutingSpec(top_k=2), weight_format="fp32"
    )
    placement = replace(
        linear(8, expert_rank, 2),
        tp_rank=slice_rank,
        tp_size=2,
        group=groups[0][slice_rank],
        slice_group=groups[1][expert_rank],
    )
    columns, ids = slice(32 * slice_rank, 32 * slice_rank + 32), list(placement.expert_ids)
    weights = expert_weights(
        experts.gate_up.decode()[ids][:, :, columns].contiguous(),
        experts.down.decode()[ids][:, :, columns].contiguous(),
    )
    x = heavy_tailed(9 + 4 * expert_rank, 64, seed=expert_rank)
    router = RouterWeights(weight=heavy_tailed(8, 64, seed=8))
    whole = Problem(spec=spec, device=probe("cpu"), dtype="fp32", limits=Limits(max_tokens=512))
    truth = MoELayer(experts, plan(whole), router=router)(x)
    errors: list[float] = []
    for count in (1, 2):
        overrides = Overrides(dispatcher="all_to_all", microbatches=count, allow_slow=True)
        layer = MoELayer(weights, plan(replace(whole, placement=placement), overrides), router=router)
        kept.append(layer)
        errors.append(relative_error(layer(x), truth))
    return errors


# Ranks 0 and 1 hold slices of the same experts.
PAIRS = (([0, 2], [1, 3]), ([0, 1], [2, 3]))


def test_halves_of_slices() -> None:
    for whole, halves in run_ranks(_sliced, 4):
        assert whole < 1e-5
        assert halves < 1e-5


def _refused(rank: int) -> list[str]:
    """Return the errors of a batch that is too large on one rank, and of ranks of which one has whole batches."""
    placement = linear(EXPERTS, rank, 2)
    options: dict[str, Any] = {"dispatcher": "all_to_all", "max_tokens": 301}
    layer = layer_of("shared", RECIPES[1], "cpu", placement, microbatches=2, allow_slow=True, **options)
    kept.append(layer)
    errors = [error_of(lambda: layer(torch.zeros(302 if rank else 4, HIDDEN)))]
    assert bool(layer(torch.ones(3, HIDDEN)).isfinite().all())
    errors.append(
        error_of(
            lambda: layer_of("shared", RECIPES[1], "cpu", placement, microbatches=1 + rank, allow_slow=True, **options)
        )
    )
    return errors


def test_refusals_reach_every_rank() -> None:
    for too_large, different in run_ranks(_refused, 2):
        assert_values(too_large, "max_tokens=301", "302 tokens")
        assert_values(different, "ranks 0 and 1 differ", "microbatches 1 and 2")


def _broken(rank: int) -> tuple[str, float]:
    """Return the error, and after how long, where the experts of rank 1 fail on the first half."""
    placement = linear(EXPERTS, rank, 2)
    layer = layer_of(
        "plain", RECIPES[1], "cpu", placement, dispatcher="all_to_all", microbatches=2, allow_slow=True, max_tokens=512
    )
    kept.append(layer)
    calls: list[int] = []
    original = half_batches.run_experts

    def failing(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if rank and len(calls) == 1:
            raise InputError("no experts")
        return original(*arguments)

    timeout_seconds(3)
    started = time.monotonic()
    with patch.object(half_batches, "run_experts", failing):
        error = error_of(lambda: layer(torch.ones(8, HIDDEN)))
    return error, time.monotonic() - started


def test_failure_between_halves_ends_the_wait() -> None:
    (waiting, seconds), (failed, _) = run_ranks(_broken, 2)
    assert "no experts" in failed
    assert_values(waiting, "RankError", "rank 1", "all_to_all dispatch", "3 s")
    assert seconds < 30


SPEC = MoESpec(
    hidden_size=2048,
    intermediate_size=1024,
    num_experts=64,
    routing=RoutingSpec(top_k=4),
    shared=SharedSpec(intermediate_size=1024),
)
HOPPER = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30, sms=132, peers=2)


def _problem(placement: Placement | None, device: DeviceFacts = HOPPER, **others: Any) -> Problem:
    return Problem(spec=SPEC, device=device, placement=placement, **others)


def test_a_plan_reports_halves() -> None:
    # Without the override, GPUs of one host read each other's memory.
    whole = plan(_problem(linear(64, 0, 2)))
    assert (whole.dispatcher, whole.microbatches, whole.to_json()["microbatches"]) == ("symm_mem", 1, 1)
    assert "halves" not in whole.explain()
    halves = plan(_problem(linear(64, 0, 2)), HALVES)
    assert (halves.dispatcher, halves.microbatches, halves.to_json()["microbatches"]) == ("all_to_all", 2, 2)
    assert re.search(r"\n *halves .*\b2\b", halves.explain())
    assert re.search(r"\n *warning .*allow_slow", halves.explain())
    assert "warning" not in whole.explain()
    assert re.search(r"\n *shared +overlapped", halves.explain())
    reasons = {refusal.name: refusal.reason for refusal in halves.refusals if refusal.what == "dispatcher"}
    assert_values(reasons["symm_mem"], "microbatches=2 was forced", "occupy the GPU")
    # Other weights run as the layer's weights did.
    swapped = plan_swap(halves, {"weight_format": "fp8_block"})
    assert (swapped.microbatches, swapped.overrides.allow_slow) == (2, True)


@pytest.mark.parametrize(
    ("problem", "overrides", "values"),
    [
        (_problem(None), HALVES, ("one rank", "no token travels")),
        (_problem(tensor_parallel(64, 0, 2)), HALVES, ("slice", "no token travels")),
        (_problem(replace(linear(64, 0, 2), same_tokens=True)), HALVES, ("2 ranks", "same tokens")),
        (_problem(replace(linear(64, 0, 2), spare=1)), HALVES, ("load balancing", "1 spare slot", "counts")),
        (_problem(linear(64, 0, 2)), replace(HALVES, pipeline="mega"), ("pipeline mega",)),
        (_problem(linear(64, 0, 2)), Overrides(microbatches=2), ("allow_slow=True", "1.5x slower", "96 rows")),
        (_problem(linear(64, 0, 2), probe("cpu")), Overrides(microbatches=2), ("allow_slow=True",)),
        (_problem(linear(64, 0, 2)), replace(HALVES, dispatcher="symm_mem"), ("symm_mem", "occupy the GPU")),
    ],
)
def test_plans_refuse_halves(problem: Problem, overrides: Overrides, values: tuple[str, ...]) -> None:
    with raises_with(PlanError, "microbatches=2", *values):
        plan(problem, overrides)
    assert plan(problem, replace(overrides, microbatches=1, allow_slow=False, pipeline=None)).microbatches == 1


def test_halves_in_graphs_have_fixed_messages() -> None:
    made = plan(_problem(linear(64, 0, 2), graph=True), HALVES)
    assert (made.dispatcher, made.capturable, made.microbatches) == ("all_to_all_fixed", True, 2)
    assert "halves     every batch runs as 2 halves" in made.explain()
    whole = plan(_problem(linear(64, 0, 2), graph=True), Overrides(dispatcher="all_to_all_fixed"))
    assert made.wire_format == whole.wire_format


def _room(rank: int) -> list[str]:
    """Return the errors of batches from rank 0 to experts of rank 1, of which a rank may send 6 tokens to another."""
    placement = linear(EXPERTS, rank, 2)
    options: dict[str, Any] = {"dispatcher": "all_to_all_fixed", "max_tokens": 64, "room": 6}
    layer = layer_of("plain", RECIPES[1], "cpu", placement, microbatches=2, allow_slow=True, **options)
    kept.append(layer)
    errors: list[str] = []
    for tokens in (6, 7):
        x = heavy_tailed(tokens, HIDDEN, seed=rank)
        ids = torch.full((tokens, 3), -1)
        ids[:, 0] = EXPERTS - 1 if rank == 0 else 0
        routing = Routing(topk_ids=ids, topk_weights=torch.ones(ids.shape))
        errors.append(error_of(lambda x=x, routing=routing: layer(x, routing=routing)))
    return errors


def test_halves_share_the_room_of_messages() -> None:
    for six, seven in run_ranks(_room, 2):
        assert six == "none"
        assert_values(seven, "rank_tokens=3", "half", "rank 0: 4")


def test_numbers_of_microbatches() -> None:
    assert plan(_problem(linear(64, 0, 2), probe("cpu")), HALVES).microbatches == 2
    assert plan(_problem(linear(64, 0, 2), limits=Limits(max_tokens=2)), HALVES).microbatches == 2
    for count in (0, 3, True, "2"):
        with raises_with(SpecError, "microbatches", "1 or 2"):
            Overrides(microbatches=count)  # pyright: ignore[reportArgumentType]
    with raises_with(SpecError, "allow_slow", "1", "True or False"):
        Overrides(allow_slow=1)  # pyright: ignore[reportArgumentType]
