"""Layers with more experts than slots on a GPU: the bits of layers that hold all, in graphs, streams and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium import Limits, MoELayer, MoESpec, Overrides, Problem, Routing, RoutingSpec, load_layer, plan, probe
from collegium.graphs import capture
from collegium.planning import kernel_named
from collegium.problem import PAGING
from collegium.testing.compare import heavy_tailed, random_experts
from integers import encoded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EXPERTS, HIDDEN, WIDTH, TOP_K, MAX_TOKENS = 24, 512, 256, 3, 2048
RECIPES = [
    ("bf16", None),
    ("fp8_block", "fp8_group128"),
    ("mxfp4", None),
    ("mxfp4", "fp8_token"),
    ("nvfp4", "fp8_group128"),
    ("int4_group", None),
]


def layers(weights: str, activations: str | None, slots: int, **options: Any) -> tuple[MoELayer, MoELayer]:
    """Return layers with all experts, and with ``slots`` slots, on the GPU."""
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=TOP_K),
        weight_format=weights,
        expert_bias=True,
    )
    on_host = encoded(random_experts(EXPERTS, 2, WIDTH, HIDDEN, seed=1, bias=True), weights)
    on_gpu = replace(
        on_host,
        gate_up=on_host.gate_up.to("cuda"),
        down=on_host.down.to("cuda"),
        gate_up_bias=on_host.gate_up_bias.cuda(),
        down_bias=on_host.down_bias.cuda(),
    )
    overrides = Overrides(activation_format=activations, **options)
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=MAX_TOKENS))
    whole = MoELayer(on_gpu, plan(problem, replace(overrides, paging=None)))
    size = kernel_named(whole.plan.kernel).slot_bytes(whole.plan.problem.routed)
    limits = Limits(max_tokens=MAX_TOKENS, gpu_bytes=slots * size)
    paged = MoELayer(on_host, plan(replace(problem, limits=limits), overrides))
    assert paged.plan.problem.gpu_slots == slots
    assert paged.device == whole.device
    return whole, paged


def inputs(tokens: int, seed: int) -> tuple[torch.Tensor, Routing]:
    """Return tokens with hot experts and some ids that are no expert."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator)
    ids[:, seed % EXPERTS] += 0.7
    ids = ids.argsort(dim=1, descending=True)[:, :TOP_K]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.05, -1)
    weights = torch.rand(tokens, TOP_K, generator=generator) + 0.1
    x = heavy_tailed(tokens, HIDDEN, seed=seed).bfloat16()
    return x.cuda(), Routing(topk_ids=ids.cuda(), topk_weights=weights.cuda())


@pytest.mark.parametrize(("weights", "activations"), RECIPES)
@pytest.mark.parametrize("slots", [3, 11])
def test_graphs_and_calls_have_the_bits(weights: str, activations: str | None, slots: int) -> None:
    whole, paged = layers(weights, activations, slots)
    runner = capture(paged, (1, 8, 200), routing_input="routing")
    for seed in range(8):
        for tokens in (1, 5, 8, 150, MAX_TOKENS):
            x, routing = inputs(tokens, seed)
            wanted = whole(x, routing=routing)
            assert torch.equal(paged(x, routing=routing), wanted)
            if tokens <= 200:
                assert torch.equal(runner(x, routing=routing), wanted)
    hits, misses = paged.experts.hits_and_misses
    assert hits > 0 < misses


@pytest.mark.parametrize("policy", PAGING)
def test_thousands_of_replays(policy: str) -> None:
    whole, paged = layers("mxfp4", None, 7, paging=policy)
    runner = capture(paged, (2, 16), routing_input="routing")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    batches = [inputs(1 + seed % 16, seed) for seed in range(100)]
    wanted = [whole(x, routing=routing) for x, routing in batches]
    for step in range(3400):
        x, routing = batches[step * 37 % 100]
        wrong += (runner(x, routing=routing) != wanted[step * 37 % 100]).any()
    assert int(wrong) == 0


def test_streams_take_turns() -> None:
    whole, paged = layers("fp8_block", "fp8_group128", 5)
    batches = [inputs(1 + 13 * seed, seed) for seed in range(8)]
    wanted = [whole(x, routing=routing) for x, routing in batches]
    torch.cuda.synchronize()

    def run(index: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            x, routing = batches[index % 8]
            return all(torch.equal(paged(x, routing=routing), wanted[index % 8]) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(16)))


def test_loaded_layer_is_paged() -> None:
    whole = load_layer("fables-16m", 1, device="cuda")
    limits = Limits(gpu_bytes=6 * whole.experts.slot_bytes)
    paged = load_layer("fables-16m", 1, device="cuda", limits=limits)
    fitting = load_layer("fables-16m", 1, device="cuda", limits=Limits(gpu_bytes=1 << 30))
    assert paged.plan.problem.gpu_slots == 6
    assert fitting.plan.paging is None
    for tokens in (1, 40, 3000):
        x = heavy_tailed(tokens, whole.spec.hidden_size, seed=tokens).bfloat16().cuda()
        wanted = whole(x)
        assert torch.equal(paged(x), wanted)
        assert torch.equal(fitting(x), wanted)
