"""Layers with more experts than slots on the GPU: the bits of layers that hold all of them, and what they refuse."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from collegium import (
    DeviceFacts,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    Routing,
    RoutingSpec,
    loading,
    plan,
)
from collegium.balance.load import LoadTrace
from collegium.balance.residency import Misses, expected_misses
from collegium.checkpoint.layer_view import CheckpointLayer
from collegium.checkpoint.loader import load_experts
from collegium.checkpoint.reader import Checkpoint
from collegium.commands.gpu_memory import layer_gpu_bytes
from collegium.commands.inspect import plan_model
from collegium.commands.measure import measure_host_bandwidth
from collegium.experts.paging.table import POLICIES
from collegium.locate import locate
from collegium.ops import paging
from collegium.parallel.placement import linear
from collegium.pipelines import paged as pipeline
from collegium.planning import kernel_named
from collegium.problem import PAGING
from collegium.runtime import pinned
from collegium.runtime.memory import Arena, memory_map
from collegium.runtime.warm_up import run_all_paths
from collegium.testing.compare import heavy_tailed, random_experts
from collegium.types import SharedSpec
from integers import encoded

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

EXPERTS, HIDDEN, WIDTH, TOP_K, MAX_TOKENS = 7, 192, 96, 2, 24
RECIPES = (
    ("bf16", None),
    ("fp8_block", "fp8_group128"),
    ("fp8_channel", "fp8_token"),
    ("mxfp4", None),
    ("mxfp4", "fp8_group128"),
    ("nvfp4", "fp8_token"),
    ("int4_ordered", None),
)
CPU = torch.device("cpu")
FACTS = DeviceFacts(kind="cuda", capability=(9, 0))


@dataclass(frozen=True)
class Case:
    """Options of a layer; slots: None for all experts on the device."""

    weights: str = "bf16"
    activations: str | None = None
    weight_on_input: bool = False
    policy: str | None = None

    def spec(self) -> MoESpec:
        """Return the model's layer."""
        rule = RoutingSpec(top_k=TOP_K, weight_on_input=self.weight_on_input, renormalize=not self.weight_on_input)
        return MoESpec(
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            num_experts=EXPERTS,
            routing=rule,
            weight_format=self.weights,
            expert_bias=True,
        )

    def problem(self, gpu_bytes: int | None = None) -> Problem:
        """Return the problem of the layer."""
        return Problem(spec=self.spec(), device=FACTS, limits=Limits(max_tokens=MAX_TOKENS, gpu_bytes=gpu_bytes))

    def layers(self, slots: int, **options: Any) -> tuple[MoELayer, MoELayer]:
        """Return the layer with all experts on the device, and with ``slots`` slots."""
        weights = encoded(random_experts(EXPERTS, 2, WIDTH, HIDDEN, seed=1, bias=True), self.weights, group=32)
        overrides = Overrides(activation_format=self.activations)
        whole = plan(self.problem(), overrides)
        size = kernel_named(whole.kernel).slot_bytes(whole.problem.routed)
        paged = plan(self.problem(slots * size + 7), replace(overrides, paging=self.policy))
        assert (paged.problem.gpu_slots, paged.pipelines) == (slots, ("paged",))
        return MoELayer(weights, whole, **options), MoELayer(weights, paged, **options)


def routing(tokens: int, seed: int) -> Routing:
    """Return experts of which two are hot, some ids that are no expert, and weights."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator)
    ids[:, :2] += 0.5
    ids = ids.argsort(dim=1, descending=True)[:, :TOP_K]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, -1)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.05, (1 << 40) + 1)
    return Routing(topk_ids=ids, topk_weights=torch.rand(tokens, TOP_K, generator=generator) + 0.1)


def outputs(layer: MoELayer, tokens: int, seed: int) -> Tensor:
    """Return the layer's output for tokens of ``seed``, 1.5 in place of NaN."""
    x = heavy_tailed(tokens, HIDDEN, seed=seed).bfloat16()
    return layer(x, routing=routing(tokens, seed)).nan_to_num(1.5)


@pytest.mark.each_choice
@pytest.mark.parametrize(("weights", "activations"), RECIPES)
@pytest.mark.parametrize("slots", [2, 5])
def test_bits_equal_resident_layer(weights: str, activations: str | None, slots: int) -> None:
    whole, paged = Case(weights, activations).layers(slots)
    # From any number of rows on, the slots are two groups.
    rows = {2: 0, 5: 256}[slots]
    with patch.object(paging, "on_device", lambda *_: True), patch.object(paging, "_COPIES_DOMINATE", rows):
        for seed, tokens in enumerate((1, 1, 2, 9, 3, MAX_TOKENS, 1, MAX_TOKENS + 5)):
            assert torch.equal(outputs(paged, tokens, seed), outputs(whole, tokens, seed)), tokens
    hits, misses = paged.experts.hits_and_misses
    assert hits > 0 < misses


class LateCopies:
    """A second stream that is as slow as it may be: its copies are made when they are waited for."""

    def __init__(self, _: object) -> None:
        self.queue: list[tuple[Any, ...]] = []

    def __call__(self) -> Any:
        return patch.object(pipeline, "copy_experts", lambda *call: self.queue.append(call))

    def catch_up(self) -> None:
        """Wait for the first stream, which is ahead."""

    def join(self) -> None:
        """Make all copies."""
        for call in self.queue:
            paging.copy_experts(*call)
        self.queue.clear()


@pytest.mark.parametrize("rows", [0, 256])
def test_slow_copies_change_no_bit(rows: int) -> None:
    whole, paged = Case().layers(3)
    with patch.object(pipeline, "ForkedStream", LateCopies), patch.object(paging, "_COPIES_DOMINATE", rows):
        for seed, tokens in enumerate((9, 3, MAX_TOKENS, 2, MAX_TOKENS)):
            assert torch.equal(outputs(paged, tokens, seed), outputs(whole, tokens, seed)), tokens
    assert paged.experts.hits_and_misses[1] > 8


@pytest.mark.parametrize("policy", PAGING)
def test_policies_keep_every_bit(policy: str) -> None:
    whole, paged = Case(policy=policy).layers(3)
    for seed in range(12):
        assert torch.equal(outputs(paged, 3, seed), outputs(whole, 3, seed))
    assert paged.plan.paging is not None
    assert paged.plan.paging.name == policy
    assert f"{policy}: " in repr(paged)


def test_trace_decides_who_stays() -> None:
    _, paged = Case(policy="static").layers(3)
    frequent = torch.tensor([0.0, 9.0, 0.0, 0.0, 7.0, 0.0, 5.0])
    paged.experts.set_scores(frequent)
    for experts in ([1, 4], [6, 4], [0, 2], [3, 5], [1, 2]):
        chosen = Routing(topk_ids=torch.tensor([experts]), topk_weights=torch.ones(1, 2))
        paged(torch.zeros(1, HIDDEN, dtype=torch.bfloat16), routing=chosen)
    assert {1, 2} < set(paged.experts.tables.slot_expert.tolist())
    assert torch.equal(paged.experts.tables.scores, frequent)
    for wrong in (torch.zeros(3), frequent / 0):
        with pytest.raises(InputError, match="set_scores"):
            paged.experts.set_scores(wrong)


def test_names_of_policies_agree() -> None:
    assert tuple(policy.name for policy in POLICIES) == PAGING


def test_weights_on_the_input() -> None:
    whole, paged = Case(weight_on_input=True).layers(2)
    for seed, tokens in enumerate((1, 5, MAX_TOKENS)):
        assert torch.equal(outputs(paged, tokens, seed), outputs(whole, tokens, seed))


def test_functions_after_experts() -> None:
    whole, paged = Case().layers(2, after_expert=lambda rows: rows * 2 + 1)
    for seed, tokens in enumerate((1, 5, MAX_TOKENS)):
        assert torch.equal(outputs(paged, tokens, seed), outputs(whole, tokens, seed))


def test_threads_take_turns() -> None:
    # Triton's interpreter runs in one thread at a time: without turns, passes of a layer would fail here.
    for whole, paged in (Case().layers(2), Case("mxfp4").layers(3)):
        wanted = [outputs(whole, 4, seed) for seed in range(5)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda seed, paged=paged: outputs(paged, 4, seed), [*range(5)] * 2))
        assert all(torch.equal(result, wanted[n % 5]) for n, result in enumerate(found))


def test_warm_up_leaves_every_bit() -> None:
    whole, paged = Case("mxfp4", "fp8_group128").layers(3)
    before = paged.experts.tables.slot_expert.clone()
    for tokens in (1, 9):
        paged._compile_slots(paged._executor.pipeline_for(1), tokens)
    assert torch.equal(paged.experts.tables.slot_expert, before)
    run_all_paths(paged, 9)
    for seed, tokens in enumerate((1, 9)):
        assert torch.equal(outputs(paged, tokens, seed), outputs(whole, tokens, seed))


def test_planned_memory_is_enough() -> None:
    for slots in (2, 5):
        _, paged = Case("mxfp4", "fp8_group128", weight_on_input=False).layers(slots)
        layout = memory_map(paged.plan.regions)
        x, chosen = heavy_tailed(MAX_TOKENS, HIDDEN, seed=2).bfloat16(), routing(MAX_TOKENS, 2)
        wanted = paged(x, routing=chosen)
        memory = Arena(torch.full((layout.nbytes,), 127, dtype=torch.uint8), layout)
        runs = paged._executor.pipeline_for(MAX_TOKENS)
        with (
            patch.object(paging, "on_device", lambda *_: True),
            patch("collegium.ops.permute.on_device", lambda *_: True),
        ):
            found = runs(x, chosen, memory, dtype=torch.bfloat16, out=torch.empty_like(x))
        assert torch.equal(found.nan_to_num(1.5), wanted.nan_to_num(1.5))


def test_packed_sizes_are_planned() -> None:
    for weights, activations in RECIPES:
        whole, paged = Case(weights, activations).layers(3)
        planned, packed = paged.plan.expert_bytes, whole.experts.slot_bytes
        assert packed <= planned <= packed * (1.02 if weights.startswith("int") else 1)
        assert paged.plan.weight_bytes == 3 * planned
        assert paged.plan.to_json()["gpu_slots"] == 3


def test_all_experts_fit() -> None:
    whole = plan(Case().problem())
    fitting = plan(Case().problem(EXPERTS * whole.expert_bytes * 2))
    assert fitting.paging is None
    assert fitting.token_ranges == whole.token_ranges
    assert fitting.problem.gpu_slots is None


def test_refused_plans_have_numbers() -> None:
    case, size = Case(), plan(Case().problem()).expert_bytes
    for problem, overrides, text in (
        (case.problem(size), None, "more than the [01] slots"),
        (replace(case.problem(3 * size), device=DeviceFacts(kind="cpu")), None, "device is a cpu"),
        (case.problem(3 * size), Overrides(kernel="reference"), "kernel reference"),
        (case.problem(3 * size), Overrides(pipeline="split"), "pipeline='split'"),
        (case.problem(3 * size), Overrides(dispatcher="all_to_all"), "dispatcher='all_to_all'"),
        (case.problem(), Overrides(paging="lfu"), "without a limit"),
        (case.problem(), Overrides(pipeline="paged"), "paged"),
    ):
        with pytest.raises(PlanError, match=text):
            plan(problem, overrides)


def test_refused_merged_shared_expert() -> None:
    problem = Case().problem(1 << 18)
    shared = SharedSpec(intermediate_size=WIDTH)
    problem = replace(problem, spec=replace(problem.spec, shared=shared))
    with pytest.raises(PlanError, match="merged"):
        plan(problem, Overrides(shared="merged"))
    assert plan(problem).merged_shared_experts == 0


def test_refused_calls_name_the_limit() -> None:
    whole, paged = Case().layers(3)
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    calls = (
        lambda: paged.swap(random_experts(EXPERTS, 2, WIDTH, HIDDEN, seed=1, bias=True)),
        lambda: paged.run_batched(x[None].expand(EXPERTS, 1, HIDDEN), torch.zeros(EXPERTS, dtype=torch.int32)),
        lambda: paged.run_quantized(x.to(torch.float8_e4m3fn), torch.ones(1), routing(1, 0)),
        lambda: paged.experts.slots(),
        lambda: copy.deepcopy(paged),
        lambda: pickle.dumps(paged),
    )
    for call in calls:
        with pytest.raises(InputError, match="gpu_bytes"):
            call()
    shared = copy.copy(paged)
    assert shared.experts is paged.experts
    assert torch.equal(outputs(shared, 3, 1), outputs(whole, 3, 1))


def test_memory_that_cannot_be_locked() -> None:
    with (
        patch("torch.cuda.cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2)),
        pytest.raises(InputError, match=r"4,096 bytes .* returned 2"),
    ):
        pinned._lock(torch.empty(4096, dtype=torch.uint8))
    with pytest.raises(InputError, match="page-locked"):
        pinned.PinnedBlock(1 << 60, CPU)


def test_loading_keeps_experts_on_the_host() -> None:
    checkpoint = Checkpoint.open(locate("fables-16m"))
    view = CheckpointLayer.open(checkpoint, 2)
    with patch.object(loading, "probe", lambda *_: FACTS):
        paged = loading.load_routed(view, limits=Limits(max_tokens=8, gpu_bytes=5 * 294912))
    whole_plan = replace(paged.plan.problem, limits=Limits(max_tokens=8), gpu_slots=None)
    whole = MoELayer(load_experts(view, linear(view.spec.num_experts), device="cpu"), plan(whole_plan))
    assert paged.plan.problem.gpu_slots == 5
    assert paged.layer_id == 2
    for seed, tokens in enumerate((1, 5)):
        x = heavy_tailed(tokens, view.spec.hidden_size, seed=seed).bfloat16()
        logits = heavy_tailed(tokens, view.spec.num_experts, seed=seed)
        assert torch.equal(paged(x, router_logits=logits), whole(x, router_logits=logits))


def test_command_shares_memory_among_layers() -> None:
    size, layers = 294912, 6
    chosen = plan_model("fables-16m", device="h100", gpu_memory=f"{size * 9 * layers / 1e6}MB")
    assert chosen.problem.gpu_slots == 9
    assert plan_model("fables-16m", device="h100", gpu_memory="1GiB").paging is None
    for text in ("24", "GiB", "-1GiB", "1 XiB", "nanMB"):
        with pytest.raises(InputError, match="--gpu-memory"):
            layer_gpu_bytes(text, {})


def trace_of(experts: int, *, steps: int, layers: int) -> LoadTrace:
    """Return a trace of one assignment in each step and layer, half of them to hot experts."""
    rng = random.Random(experts)
    counts = np.zeros((steps, layers, experts), dtype=np.int64)
    for step in range(steps):
        for layer in range(layers):
            counts[step, layer, rng.choice((rng.randrange(3), rng.randrange(experts)))] += 1
    names = tuple(f"layer {number}" for number in range(layers))
    return LoadTrace(counts=counts, model="any", layers=names, top_k=1, groups=1, expert_bytes=8)


def test_trace_predicts_misses() -> None:
    trace, slots = trace_of(16, steps=40, layers=2), 5
    found = expected_misses(trace, slots, POLICIES[0])
    assert POLICIES[0].name == "lru"
    needed = missing = 0
    for layer in range(2):
        recent = [*range(slots)]  # the most recently used last
        for step in range(40):
            experts = set(trace.counts[step, layer].nonzero()[0].tolist())
            if step:
                needed, missing = needed + len(experts), missing + len(experts - set(recent))
            recent = ([e for e in recent if e not in experts] + sorted(experts))[-slots:]
    assert found.needed == pytest.approx(needed / 78)
    assert found.missing == pytest.approx(missing / 78)
    assert 0 < found.missing < found.needed
    assert found.hit_rate == pytest.approx(1 - missing / needed)
    static = expected_misses(trace, slots, POLICIES[2])
    assert static.missing < found.missing
    assert expected_misses(trace, 16, POLICIES[0]) == Misses(found.needed, 0.0)
    with pytest.raises(InputError, match="1 step"):
        expected_misses(trace_of(16, steps=1, layers=1), slots, POLICIES[0])


def test_plan_prints_expected_misses(tmp_path: Path) -> None:
    file = tmp_path / "trace.safetensors"
    trace_of(16, steps=9, layers=2).save(file)
    chosen = plan_model("fables-16m", device="h100", gpu_memory="16MB", trace=str(file))
    assert chosen.expected_misses is not None
    assert f"{chosen.expected_misses[1]:.2f} of them missing" in chosen.explain()
    facts = replace(chosen.problem.device, host_bandwidth=chosen.expert_bytes * 1e5)
    timed = replace(chosen, problem=replace(chosen.problem, device=facts))
    assert f", {10 * chosen.expected_misses[1]:.0f} us of copies" in timed.explain()
    with pytest.raises(InputError, match="16 experts of a layer are on the device"):
        plan_model("fables-16m", device="h100", trace=str(file))
    trace_of(12, steps=9, layers=2).save(file)
    with pytest.raises(InputError, match="12 experts"):
        plan_model("fables-16m", device="h100", gpu_memory="16MB", trace=str(file))


def test_bandwidth_moves_every_byte() -> None:
    assert measure_host_bandwidth(CPU, 1 << 16) > 0


def test_wrong_limits_and_policies() -> None:
    for limit in (0, -5, 1.5, True, "1GiB"):
        with pytest.raises(ValueError, match="gpu_bytes"):
            Limits(gpu_bytes=limit)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="paging"):
        Overrides(paging="mru")
