"""Few assignments without sorting: the bits of the sorted way, with any ids and weights, from poisoned memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from by_kernel import by_kernel
from collegium import Limits, MoELayer, MoESpec, Overrides, Problem, Routing, RoutingSpec, encode_experts, plan
from collegium.experts import KERNELS
from collegium.experts.triton import packed as products
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.ops.weighted_sum import weighted_sum
from collegium.parallel.local import Local, LocalKind
from collegium.pipelines import PipelineParts
from collegium.pipelines.direct import Direct, DirectKind
from collegium.pipelines.split import Split, SplitKind
from collegium.planning import TokenRange, token_ranges
from collegium.problem import DeviceFacts
from collegium.runtime.machine import machine_of
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from collegium.types import ActivationSpec
from grids import mainly
from integers import encoded
from truth import moe_truth

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

EXPERTS, HIDDEN, WIDE = 5, 176, 90
RECIPES = [
    ("bf16", None, 0.01),
    ("fp8_block", "fp8_group128", 0.06),
    ("fp8_channel", "fp8_token", 0.06),
    ("mxfp4", None, 0.01),
    ("mxfp4", "fp8_token", 0.06),
    ("nvfp4", "fp8_group128", 0.06),
    ("int4_group", None, 0.01),
    ("int4_affine", None, 0.01),
    ("int4_ordered", None, 0.01),
    ("int8_ordered", None, 0.01),
    ("gguf", None, 0.01),
]


weighted_sum_on_device = by_kernel(weighted_sum)


def build(weights: str, activations: str | None, *, wide: int = WIDE) -> tuple[Any, Any]:
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=wide,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=3),
        weight_format=weights,
    )
    made = encoded(random_experts(EXPERTS, 2, wide, HIDDEN, seed=1), weights, group=32)
    problem = Problem(spec=spec, device=DeviceFacts(kind="cuda", capability=(9, 0)), limits=Limits(max_tokens=8))
    chosen = plan(problem, Overrides(activation_format=activations))
    kernel = next(k for k in KERNELS if k.name == chosen.kernel)
    return made, kernel.pack(made, chosen.problem.routed)


def parts_of(packed: Any, top_k: int = 3) -> PipelineParts:
    return PipelineParts(experts=packed, dispatcher=Local(num_experts=EXPERTS), top_k=top_k, num_experts=EXPERTS)


NAN_ROWS = [False, False, True, False, True, True]


def odd_routing() -> Routing:
    """Ids with some that are no expert, one beyond 32 bits and an expert twice; weights with NaN."""
    ids = torch.tensor([[4, 0, 2], [3, -1, 3], [1 << 40, 1, 0], [-1, 2, -1], [0, 5, 1], [0, 2, 1]])
    weights = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    weights[1, 1], weights[3, 0], weights[5, 2] = float("nan"), float("inf"), float("nan")
    return Routing(topk_ids=ids, topk_weights=weights)


@pytest.mark.parametrize(("weights", "activations", "most"), RECIPES)
def test_direct_matches_split_bitwise(
    monkeypatch: pytest.MonkeyPatch, weights: str, activations: str | None, most: float
) -> None:
    made, packed = build(weights, activations)
    routing = odd_routing()
    x = heavy_tailed(6, HIDDEN, seed=3).bfloat16()
    wanted = Split(parts=parts_of(packed))(x, routing, dtype=torch.float32)

    taken: list[str] = []

    def poisoned(_: object, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        taken.append(name)
        return torch.full(shape, float("nan"), device=device).to(dtype)

    monkeypatch.setattr(products, "alloc", poisoned)
    found = Direct(parts=parts_of(packed))(x, routing, dtype=torch.float32)
    assert taken == ["rows", "middle"]
    assert torch.equal(found.nan_to_num(1.5), wanted.nan_to_num(1.5))
    assert found.isnan().all(dim=1).tolist() == found.isnan().any(dim=1).tolist() == NAN_ROWS
    # What is left are tokens with experts and -1.
    few = ~torch.tensor(NAN_ROWS)
    found, x, ids = found[few], x[few], routing.topk_ids[few]
    kept = routing.topk_weights[few].masked_fill(ids < 0, 0.0)
    ids = ids.clamp(min=0)
    truth = moe_truth(x, made.gate_up.decode(), made.down.decode(), ids, kept, ActivationSpec())
    swapped = moe_truth(x, made.gate_up.decode().flip(1), made.down.decode(), ids, kept, ActivationSpec())
    assert relative_error(found, truth) < most
    assert relative_error(found, swapped) > 0.3


def test_tall_tiles_of_unsorted_rows() -> None:
    _, packed = build("mxfp4", "fp8_group128")
    tall = TileChoice(block_n=128, block_t=64, warps=4, stages=2)
    x, routing = heavy_tailed(6, HIDDEN, seed=3).bfloat16(), odd_routing()
    wanted = Split(parts=parts_of(packed))(x, routing, dtype=torch.float32)
    found = Direct(parts=parts_of(replace(packed, tiles=(tall, tall))))(x, routing, dtype=torch.float32)
    assert torch.equal(found.nan_to_num(1.5), wanted.nan_to_num(1.5))


@pytest.mark.each_choice("weights", "activations")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of what this test is about
@pytest.mark.parametrize(("weights", "activations", "most"), mainly(RECIPES, RECIPES[1:6:2]))
@pytest.mark.parametrize("limit", [None, 2.0])
def test_nan_tokens_stay_in_their_row(weights: str, activations: str | None, most: float, limit: float | None) -> None:
    _, packed = build(weights, activations)
    packed = replace(packed, activation=ActivationSpec(limit=limit))
    x = heavy_tailed(4, HIDDEN, seed=3).bfloat16()
    routing = Routing(
        topk_ids=torch.tensor([[4, 0, 2], [3, 0, 2], [0, 1, 2], [0, 2, 1]]), topk_weights=torch.ones(4, 3)
    )
    ways = (
        Direct(parts=parts_of(packed)),
        Split(parts=parts_of(packed)),
    )
    clean = ways[0](x, routing, dtype=torch.float32)
    bad = x.clone()
    bad[1, 7], bad[2, 170] = float("nan"), float("-inf")
    for way in ways:
        found = way(bad, routing, dtype=torch.float32)
        assert found[1].isnan().all()
        assert not found[2].isfinite().any()
        assert torch.equal(found[[0, 3]], clean[[0, 3]])
    assert relative_error(clean, ways[1](x, routing, dtype=torch.float32)) < most


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_weighted_sum_by_ids_matches_slots(dtype: torch.dtype) -> None:
    routing = odd_routing()
    ids = routing.topk_ids.clamp(max=99).to(dtype)  # -1 is 255, and no longer "not here", in uint8
    rows = heavy_tailed(18, 33, seed=5)
    rows.view(6, 3, 33)[ids.long() == -1] = float("nan")  # the other rows hold numbers, which must not be used
    slots = torch.arange(18).view(6, 3).masked_fill(ids.long() == -1, -1)
    none = (ids.long() < -1) | (ids.long() >= EXPERTS)
    slots = slots.masked_fill(none, -2)
    lost = (none | (slots >= 0) & routing.topk_weights.isnan()).any(dim=1)
    assert lost.tolist() == ([False, True, True, True, True, True] if dtype == torch.uint8 else NAN_ROWS)
    wanted = weighted_sum(rows, slots, routing.topk_weights, torch.float32).nan_to_num(1.5)
    for weights in (routing.topk_weights, routing.topk_weights.double()):
        for run in (weighted_sum, weighted_sum_on_device):
            found = run(rows, ids, weights, torch.float32, experts=EXPERTS)
            assert torch.equal(found.nan_to_num(1.5), wanted)
            assert torch.equal(found.isnan().all(dim=1), lost)


def test_rows_use_their_token_and_expert() -> None:
    _, packed = build("bf16", None)
    x = heavy_tailed(3, HIDDEN, seed=7).bfloat16()
    ids = torch.tensor([[0, 1], [1, 4], [3, 0]], dtype=torch.int32)
    rows = packed.run_unsorted(x, ids)
    for row, (token, expert) in enumerate((t, int(ids[t, k])) for t in range(3) for k in range(2)):
        routing = Routing(topk_ids=torch.tensor([[expert]]), topk_weights=torch.ones(1, 1))
        alone = Split(parts=parts_of(packed, 1))(x[token : token + 1], routing, dtype=torch.float32)
        assert torch.equal(rows[row].float(), alone[0])


def test_tokens_rereading_weights_are_sorted() -> None:
    _, packed = build("bf16", None)
    assert packed.tiling.unsorted_tokens(3) == 5  # so small that reading twice costs nothing
    assert packed.tiling.unsorted_tokens(16) == 1
    assert packed.tiling.unsorted_tokens(17) == 0
    slow = replace(packed, machine=replace(packed.machine, bandwidth=0.01))
    assert slow.tiling.unsorted_tokens(3) == 1  # a token never asks for an expert twice
    # Two tokens of two experts each hit 5 - 5 * 0.6 ** 2 = 3.2 of 5, so 0.8 experts are read again in 4 us or less.
    each = (packed.gate_up.values.nbytes + packed.down.values.nbytes) / 5
    for bandwidth, most in ((0.21 * each, 2), (0.19 * each, 1)):
        other = replace(packed, machine=replace(packed.machine, bandwidth=bandwidth))
        assert other.tiling.unsorted_tokens(2) == most


def said(packed: Any, limit: int, *, direct: bool) -> str:
    """Return what a plan says of batches of up to ``limit`` tokens, as a layer corrects it after packing."""
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=packed.down.layout.shape[3],
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=3),
    )
    facts = DeviceFacts(kind="cuda", capability=(9, 0))
    made = plan(Problem(spec=spec, device=facts, limits=Limits(max_tokens=limit)))
    kinds = (DirectKind(), SplitKind()) if direct else (SplitKind(),)
    found = token_ranges(kinds, LocalKind(), packed.tiling, made.problem)
    made = replace(made, token_ranges=found)
    assert f"batches    {made.batches()}\n" in made.explain()
    return made.batches()


def test_layer_reports_pipeline_by_token_count() -> None:
    _, packed = build("bf16", None)
    few, many = "tokens: direct (unsorted, small tiles)", "tokens: split (sorted by expert, small tiles)"
    assert said(packed, 8192, direct=True) == f"1 to 5 {few}; 6 to 8,192 {many}"
    assert said(packed, 6, direct=True) == f"1 to 5 {few}; 6 {many}"
    assert said(packed, 2, direct=True) == f"1 to 2 {few}"
    assert said(packed, 8192, direct=False) == f"1 to 8,192 {many}"
    large = replace(build("bf16", None, wide=96)[1], machine=machine_of((9, 0), 132))
    found = next(rows for rows in range(1, 3 * 8192) if large.tiling.large(rows) is not None)
    assert large.tiling.large(found - 1) is None
    first = -(-found // 3)
    words = f"1 to {first - 1:,} {many}; {first:,} to 8,192 tokens: split (sorted by expert, large tiles)"
    assert said(large, 8192, direct=False) == words


def test_plan_lists_pipelines_before_packing() -> None:
    spec = MoESpec(hidden_size=HIDDEN, intermediate_size=96, num_experts=EXPERTS, routing=RoutingSpec(top_k=3))
    problem = Problem(spec=spec, device=DeviceFacts(kind="cuda", capability=(9, 0)), limits=Limits(max_tokens=900))
    assert plan(problem).token_ranges == (
        TokenRange(tokens=1, pipeline="direct", tiles="small tiles"),
        TokenRange(tokens=6, pipeline="split", tiles="small tiles"),
        TokenRange(tokens=200, pipeline="split", tiles="large tiles"),
    )
    assert plan(problem, Overrides(pipeline="split")).pipelines == ("split",)
    packed = build("bf16", None)[1]
    assert (DirectKind().max_tokens(packed.tiling, 3), SplitKind().max_tokens(packed.tiling, 3)) == (5, None)


@pytest.mark.parametrize("most", [1, 5, 6])
def test_empty_batch_when_all_unsorted(most: int) -> None:
    spec = MoESpec(hidden_size=HIDDEN, intermediate_size=WIDE, num_experts=EXPERTS, routing=RoutingSpec(top_k=3))
    problem = Problem(spec=spec, device=DeviceFacts(kind="cuda", capability=(9, 0)), limits=Limits(max_tokens=most))
    weights = encode_experts(random_experts(EXPERTS, 2, WIDE, HIDDEN, seed=1), "bf16")
    layer = MoELayer(weights, plan(problem))
    assert layer.plan.pipelines == (("direct",) if most < 6 else ("direct", "split"))
    x, logits = heavy_tailed(7, HIDDEN, seed=2).bfloat16(), heavy_tailed(7, EXPERTS, seed=3)
    whole = layer(x, router_logits=logits)
    for tokens in (0, 1, most, 7):
        found = layer(x[:tokens], router_logits=logits[:tokens])
        assert torch.equal(found, whole[:tokens])
    assert not layer.plan.ranges_from_packing
    # What packing finds cannot be run unsorted is sorted.
    layer.replan(plan(problem), replace(layer.experts, machine=replace(layer.experts.machine, bandwidth=1e-9)))
    assert layer.plan.ranges_from_packing == ("by packing" in str(layer)) == (most > 1)
    assert torch.equal(layer(x, router_logits=logits), whole)
