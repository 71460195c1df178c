"""The shared expert runs while ranks exchange rows, where they do; otherwise the plan reports when it runs."""

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
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Placement,
    PlanError,
    Problem,
    RouterWeights,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    expert_weights,
    plan,
    probe,
)
from collegium.parallel import collectives
from collegium.parallel.collectives import PendingRows
from collegium.parallel.placement import linear, tensor_parallel
from collegium.parallel.symm_mem import SymmMem
from collegium.pipelines import split
from collegium.stages.shared import SharedExpert
from collegium.testing.compare import heavy_tailed, random_experts
from raising import raises_with
from ranks import run_ranks
from split_layers import EXPERTS, HIDDEN, RECIPES, equal, layer_of
from watching import watch

DISPATCHERS = ("all_to_all", "all_gather", "all_to_all_fixed", "symm_mem")
TYPED = RECIPES[1]  # float32: no rounding hides another order


def _recorded(layer: MoELayer, x: torch.Tensor) -> tuple[list[str], torch.Tensor]:
    """Return the order in which exchanges start and end and the shared expert runs, and the output."""
    events: list[str] = []
    with (
        watch(events, collectives, "_start", "start"),
        watch(events, PendingRows, "wait", "wait"),
        watch(events, SharedExpert, "__call__", "shared"),
        watch(events, SymmMem, "send", "start"),
        watch(events, SymmMem, "receive", "wait"),
        watch(events, SymmMem, "combine", "combine"),
    ):
        result = layer(x)
    return events, result


def _orders(rank: int) -> dict[str, Any]:
    """Return the recorded orders by dispatcher, mode and placement, and whether the bits are those of one order."""
    world = distributed.get_world_size()
    found: dict[str, Any] = {}
    whole = layer_of("shared", TYPED, "cpu")
    for name in DISPATCHERS:
        for same_tokens in (False, True):
            placed = replace(linear(EXPERTS, rank, world), same_tokens=same_tokens)
            x = heavy_tailed(9, HIDDEN, seed=3 if same_tokens else rank)
            outputs: list[torch.Tensor] = []
            for mode in (None, "overlapped", "sequential"):
                layer = layer_of("shared", TYPED, "cpu", placed, dispatcher=name, shared=mode)
                _kept.append(layer)
                events, result = _recorded(layer, x)
                outputs.append(result)
                found[f"{name} {same_tokens} {mode}"] = events
            found[f"{name} {same_tokens} bits"] = all(torch.equal(other, outputs[0]) for other in outputs)
            found[f"{name} {same_tokens} bits"] &= equal(outputs[0], whole(x), exact=False)
    return found


_kept: list[MoELayer] = []  # until the process ends, as a program keeps its model


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_order_of_every_dispatcher(world: int) -> None:
    for found in run_ranks(_orders, world, seconds=300):
        for key, events in found.items():
            name, same_tokens, mode = key.split()
            if mode == "bits":
                assert events, key
                continue
            gathered = ["start", "wait"] if same_tokens == "True" else []
            if name == "symm_mem":
                overlapped = ["start", "shared", "wait", "combine"]
                sequential = ["start", "wait", "shared", "combine"]
            else:
                overlapped = ["start", "wait", "start", "shared", "wait"]
                sequential = ["start", "wait", "shared", "start", "wait"]
            assert events == (sequential if mode == "sequential" else overlapped) + gathered, key


SLICED = MoESpec(
    hidden_size=64,
    intermediate_size=64,
    num_experts=6,
    routing=RoutingSpec(top_k=2),
    shared=SharedSpec(intermediate_size=64),
    weight_format="fp32",
)


def _cut(width: slice, placed: Placement | None = None, shared: Any = None) -> MoELayer:
    """Return a layer of columns ``width`` of every expert. shared: how its shared expert is forced to run."""
    whole = encode_experts(random_experts(6, 2, 64, 64, seed=1), "fp32")
    gate_up, down = whole.gate_up.decode()[:, :, width], whole.down.decode()[:, :, width]
    problem = Problem(spec=SLICED, device=probe("cpu"), dtype="fp32", limits=Limits(max_tokens=16), placement=placed)
    return MoELayer(
        expert_weights(gate_up.contiguous(), down.contiguous()),
        plan(problem, Overrides(shared=shared)),
        router=RouterWeights(weight=heavy_tailed(6, 64, seed=8)),
        shared=SharedWeights(experts=encode_experts(random_experts(1, 2, 64, 64, seed=5), "fp32")),
    )


def _sums_of_slices(rank: int) -> list[Any]:
    """Return the orders where ranks hold slices, and whether the output is that of one rank."""
    world = distributed.get_world_size()
    x, whole = heavy_tailed(9, 64, seed=3), _cut(slice(None))
    found = list[Any]()
    for mode in (None, "sequential"):
        size = 64 // world
        layer = _cut(slice(rank * size, (rank + 1) * size), tensor_parallel(6, rank, world), mode)
        _kept.append(layer)
        events, result = _recorded(layer, x)
        found += [events, equal(result, whole(x), exact=False)]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_sums_of_slices_travel_meanwhile(world: int) -> None:
    for overlapped, same, sequential, also in run_ranks(_sums_of_slices, world):
        assert overlapped == ["start", "shared", "wait"]
        assert sequential == ["shared", "start", "wait"]
        assert same
        assert also


LATE, RUN_EXPERTS = 1.5, "run_experts"


def _late(rank: int, name: str) -> tuple[float, float]:
    """Return after how many seconds of a pass the shared expert began and the pass ended, where rank 1 is late."""
    layer = layer_of("shared", TYPED, "cpu", linear(EXPERTS, rank, 2), dispatcher=name)
    _kept.append(layer)
    x = heavy_tailed(9, HIDDEN, seed=rank)
    layer(x)
    started, began = time.monotonic(), list[float]()
    original: Any = SharedExpert.__call__
    run_experts: Any = getattr(split, RUN_EXPERTS)

    def shared(*arguments: Any) -> torch.Tensor:
        began.append(time.monotonic() - started)
        return original(*arguments)

    def experts(*arguments: Any) -> torch.Tensor:
        time.sleep(LATE * rank)
        return run_experts(*arguments)

    with patch.object(SharedExpert, "__call__", shared), patch.object(split, RUN_EXPERTS, experts):
        layer(x)
    return began[0], time.monotonic() - started


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "all_to_all_fixed"])
def test_shared_expert_runs_before_late_rows(name: str) -> None:
    (began, ended), _ = run_ranks(partial(_late, name=name), 2)
    assert ended >= LATE
    assert began < ended - LATE / 2, "rows of rank 1 come late, and the shared expert runs before"


SPEC = MoESpec(
    hidden_size=2048,
    intermediate_size=1024,
    num_experts=64,
    routing=RoutingSpec(top_k=4),
    shared=SharedSpec(intermediate_size=1024),
    weight_format="fp8_block",
)
HOPPER = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30, sms=132, peers=2)
FAR = replace(HOPPER, peers=1)


def _problem(device: DeviceFacts, spec: MoESpec = SPEC, placed: Placement | None = None, **others: Any) -> Problem:
    placed = placed or linear(64, 0, 2)
    return Problem(spec=spec, device=device, placement=placed, limits=Limits(max_tokens=64), **others)


@pytest.mark.parametrize(
    ("problem", "overrides", "overlap", "text"),
    [
        (_problem(FAR), Overrides(), "return", "overlapped: runs while results return from other ranks"),
        (_problem(FAR, graph=True), Overrides(), "return", "overlapped: runs while results return from other ranks"),
        (
            _problem(HOPPER),
            Overrides(pipeline="split"),
            "dispatch",
            "overlapped: runs while tokens travel to other ranks",
        ),
        (
            _problem(FAR, placed=tensor_parallel(64, 0, 2)),
            Overrides(),
            "return",
            "side_stream for up to 512 tokens in a CUDA graph, otherwise overlapped: runs while results return",
        ),
        (
            _problem(FAR),
            Overrides(shared="sequential"),
            "",
            "sequential, after the routed experts: shared='sequential' was forced",
        ),
        (
            _problem(HOPPER, activation_format="fp8_group128"),
            Overrides(pipeline="mega"),
            "",
            "sequential, before the kernel: the kernel of mega does the exchange and occupies the whole GPU",
        ),
        (
            _problem(FAR, replace(SPEC, latent_size=512)),
            Overrides(),
            "",
            "sequential, after the routed experts: the layer has latent projections",
        ),
        (
            _problem(FAR, placed=Placement(world_size=2, expert_ids=tuple(range(64)))),
            Overrides(),
            "",
            "side_stream for up to 512 tokens in a CUDA graph, otherwise sequential, after the routed experts: the "
            "dispatcher local exchanges nothing",
        ),
    ],
)
def test_plan_reports_shared_overlap(problem: Problem, overrides: Overrides, overlap: str, text: str) -> None:
    made = plan(problem, overrides)
    assert made.shared_overlap == overlap
    assert made.to_json()["shared_overlap"] == overlap
    assert f"shared     {text}" in made.explain()
    if overlap:
        forced = plan(problem, replace(overrides, shared="overlapped"))
        assert (forced.shared_overlap, forced.side_stream_tokens) == (overlap, 0)
    elif overrides.shared is None:
        with raises_with(PlanError, "shared='overlapped'", text.split(": ")[-1], "shared='sequential'"):
            plan(problem, replace(overrides, shared="overlapped"))


def test_single_rank_overlaps_nothing() -> None:
    alone = replace(_problem(HOPPER), placement=None)
    assert plan(alone).shared_overlap == ""
    with raises_with(PlanError, "shared='overlapped'", "local", "exchanges nothing"):
        plan(alone, Overrides(shared="overlapped"))
    assert plan(replace(alone, spec=replace(SPEC, shared=None)), Overrides(shared="overlapped")).shared_overlap == ""


def test_shared_experts_of_the_caller_overlap() -> None:
    spec, names = replace(SPEC, shared=None), {"shared_experts": "Mlp"}
    for device, overlap in ((HOPPER, "dispatch"), (FAR, "return")):
        made = plan(_problem(device, spec), Overrides(pipeline="split"))
        assert made.shared_overlap == ""
        with_module = made.with_caller_modules(names)
        assert with_module.shared_overlap == overlap
        assert re.search(r"\n *shared +overlapped", with_module.explain())
        assert made.with_caller_modules({"gate": "Gate"}).shared_overlap == ""
    alone = plan(replace(_problem(HOPPER, spec), placement=None), Overrides(shared="overlapped"))
    with raises_with(PlanError, "shared='overlapped'", "exchanges nothing"):
        alone.with_caller_modules(names)


def test_modules_opt_in_to_side_streams() -> None:
    spec, names = replace(SPEC, shared=None), {"shared_experts": "Mlp"}
    alone = replace(_problem(HOPPER, spec), placement=None)
    assert plan(alone).with_caller_modules(names).side_stream_tokens == 0
    forced = plan(alone, Overrides(shared="side_stream")).with_caller_modules(names)
    assert forced.side_stream_tokens == 512
    assert re.search(r"\n *shared +side_stream for up to 512 tokens in a CUDA graph", forced.explain())
    for problem, reason in ((replace(alone, device=probe("cpu")), "cpu"), (_problem(HOPPER, spec), "symm_mem")):
        with raises_with(PlanError, "shared='side_stream'", reason):
            plan(problem, Overrides(shared="side_stream")).with_caller_modules(names)
