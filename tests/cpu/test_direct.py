"""Few assignments without sorting: the bits of the sorted way, with any ids and weights, from poisoned memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from collegium.pipeline import DirectPipeline, SplitPipeline, ways

from collegium import Choice, Limits, MoESpec, Problem, Routing, RoutingSpec, encode_experts, plan
from collegium.experts import KERNELS
from collegium.experts.triton import packed as products
from collegium.ops.weighted_sum import weighted_sum, weighted_sum_on_device
from collegium.parallel.local import Local
from collegium.problem import DeviceFacts
from collegium.runtime.machine import machine_of
from collegium.testing.compare import heavy_tailed, moe_truth, random_experts, relative_error
from collegium.types import ActivationSpec

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
]


def build(weights: str, activations: str | None, *, wide: int = WIDE) -> tuple[Any, Any, Any]:
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=wide,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=3),
        weight_format=weights,
    )
    made = encode_experts(random_experts(EXPERTS, 2, wide, HIDDEN, seed=1), weights)
    problem = Problem(spec=spec, device=DeviceFacts(kind="cuda", capability=(9, 0)), limits=Limits(max_tokens=8))
    chosen = plan(problem, Choice(activation_format=activations))
    kernel = next(k for k in KERNELS if k.name == chosen.kernel)
    return made, kernel, kernel.pack(made, chosen.problem)


NAN_ROWS = [False, False, True, False, True, True]


def odd_routing() -> Routing:
    """Ids with some that are no expert, one beyond 32 bits and an expert twice; weights with NaN."""
    ids = torch.tensor([[4, 0, 2], [3, -1, 3], [1 << 40, 1, 0], [-1, 2, -1], [0, 5, 1], [0, 2, 1]])
    weights = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    weights[1, 1], weights[3, 0], weights[5, 2] = float("nan"), float("inf"), float("nan")
    return Routing(topk_ids=ids, topk_weights=weights)


@pytest.mark.parametrize(("weights", "activations", "most"), RECIPES)
def test_bits_are_those_of_the_sorted_way(
    monkeypatch: pytest.MonkeyPatch, weights: str, activations: str | None, most: float
) -> None:
    made, kernel, packed = build(weights, activations)
    routing = odd_routing()
    x = heavy_tailed(6, HIDDEN, seed=3).bfloat16()
    wanted = SplitPipeline(dispatcher=Local(num_experts=EXPERTS), kernel=kernel, packed=packed)(x, routing)

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=device).to(dtype)

    monkeypatch.setattr(products, "empty", poisoned)
    found = DirectPipeline(packed=packed, most=6)(x, routing)
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of what this test is about
@pytest.mark.parametrize(("weights", "activations", "most"), RECIPES)
@pytest.mark.parametrize("limit", [None, 2.0])
def test_a_token_that_is_no_number_is_seen_and_touches_no_other(
    weights: str, activations: str | None, most: float, limit: float | None
) -> None:
    _, kernel, packed = build(weights, activations)
    packed = replace(packed, activation=ActivationSpec(limit=limit))
    x = heavy_tailed(4, HIDDEN, seed=3).bfloat16()
    routing = Routing(
        topk_ids=torch.tensor([[4, 0, 2], [3, 0, 2], [0, 1, 2], [0, 2, 1]]), topk_weights=torch.ones(4, 3)
    )
    ways = (
        DirectPipeline(packed=packed, most=4),
        SplitPipeline(dispatcher=Local(num_experts=EXPERTS), kernel=kernel, packed=packed),
    )
    clean = ways[0](x, routing)
    bad = x.clone()
    bad[1, 7], bad[2, 170] = float("nan"), float("-inf")
    for way in ways:
        found = way(bad, routing)
        assert found[1].isnan().all()
        assert not found[2].isfinite().any()
        assert torch.equal(found[[0, 3]], clean[[0, 3]])
    assert relative_error(clean, ways[1](x, routing)) < most


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_the_sum_by_ids_is_the_sum_by_slots(dtype: torch.dtype) -> None:
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


def test_every_row_gets_its_own_token_and_expert() -> None:
    _, kernel, packed = build("bf16", None)
    x = heavy_tailed(3, HIDDEN, seed=7).bfloat16()
    ids = torch.tensor([[0, 1], [1, 4], [3, 0]], dtype=torch.int32)
    rows = products.run_assignments(x, ids, packed)
    for row, (token, expert) in enumerate((t, int(ids[t, k])) for t in range(3) for k in range(2)):
        routing = Routing(topk_ids=torch.tensor([[expert]]), topk_weights=torch.ones(1, 1))
        alone = SplitPipeline(dispatcher=Local(num_experts=EXPERTS), kernel=kernel, packed=packed)
        assert torch.equal(rows[row].float(), alone(x[token : token + 1], routing)[0])


def test_tokens_that_would_read_weights_twice_are_sorted() -> None:
    _, _, packed = build("bf16", None)
    assert products.few_tokens(packed, 3) == 5  # so small that reading twice costs nothing
    assert products.few_tokens(packed, 16) == 1
    assert products.few_tokens(packed, 17) == 0
    slow = replace(packed, machine=replace(packed.machine, bandwidth=0.01))
    assert products.few_tokens(slow, 3) == 1  # a token never asks for an expert twice
    # Two tokens of two experts each hit 5 - 5 * 0.6 ** 2 = 3.2 of 5, so 0.8 experts are read again in 4 us or less.
    each = (packed.gate_up.values.nbytes + packed.down.values.nbytes) / 5
    for bandwidth, most in ((0.21 * each, 2), (0.19 * each, 1)):
        assert products.few_tokens(replace(packed, machine=replace(packed.machine, bandwidth=bandwidth)), 2) == most


def test_a_layer_says_which_batches_take_which_way() -> None:
    _, _, packed = build("bf16", None)
    assert ways(packed, 3, 8192, direct=True) == "up to 5 tokens unsorted, sorted by expert"
    assert ways(packed, 3, 2, direct=True) == "up to 2 tokens unsorted, sorted by expert"
    assert ways(packed, 3, 8192, direct=False) == "all sorted by expert"
    large = replace(build("bf16", None, wide=96)[2], machine=machine_of((9, 0), 132))
    found = products.large_from(large, 3 * 8192)
    assert found is not None
    assert products.large_tile(large, found) is not None
    assert products.large_tile(large, found - 1) is None
    words = f"sorted by expert, from {-(-found // 3):,} tokens with tiles for large batches"
    assert ways(large, 3, 8192, direct=False) == words
