"""Few tokens on the device, where nothing is sorted: the bits of the sorted way, also when passes follow closely."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from collegium import MoELayer, MoESpec, Overrides, Problem, Routing, RoutingSpec, plan
from collegium.pipelines.direct import Direct
from collegium.pipelines.split import Split
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts
from integers import encoded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RECIPES = [
    ("bf16", None),
    ("fp8_block", "fp8_group128"),
    ("fp8_channel", "fp8_token"),
    ("mxfp4", None),
    ("mxfp4", "fp8_token"),
    ("nvfp4", "fp8_token"),
    ("gguf", None),
]


def build(weights: str, activations: str | None) -> MoELayer:
    spec = MoESpec(
        hidden_size=384,
        intermediate_size=250,
        num_experts=17,
        routing=RoutingSpec(top_k=4),
        weight_format=weights,
    )
    coded = encoded(random_experts(17, 2, 250, 384, seed=1), weights)
    made = replace(coded, gate_up=coded.gate_up.to("cuda"), down=coded.down.to("cuda"))
    problem = Problem(spec=spec, device=probe(torch.device("cuda")))
    return MoELayer(made, plan(problem, Overrides(activation_format=activations)))


def call(tokens: int, seed: int) -> tuple[torch.Tensor, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x = heavy_tailed(tokens, 384, seed=seed).cuda().bfloat16()
    ids = torch.randint(-1, 18, (tokens, 4), generator=generator)
    weights = torch.rand(tokens, 4, generator=generator)
    weights[:, 1] = float("nan") if seed % 3 == 0 else weights[:, 1]
    return x, Routing(topk_ids=ids.cuda(), topk_weights=weights.cuda())


@pytest.mark.parametrize(("weights", "activations"), RECIPES)
def test_direct_matches_split_bitwise(weights: str, activations: str | None) -> None:
    layer = build(weights, activations)
    both = layer._context
    (_, direct), (_, split) = both.pipelines
    sorted_only = replace(both, pipelines=both.pipelines[1:])
    assert isinstance(direct, Direct)
    assert isinstance(split, Split)
    for tokens in (1, 2, 4):
        for seed in range(6):
            x, routing = call(tokens, seed)
            assert layer._executor.pipeline_for(tokens) is direct
            found = layer(x, routing=routing)
            lost = (routing.topk_ids == 17) | (routing.topk_ids >= 0) & routing.topk_weights.isnan()
            assert torch.equal(found.isnan().all(dim=1), lost.any(dim=1))
            layer._context = sorted_only
            assert layer._executor.pipeline_for(tokens) is split
            assert torch.equal(found.nan_to_num(1.5), layer(x, routing=routing).nan_to_num(1.5))
            layer._context = both


@pytest.mark.parametrize(("weights", "activations"), RECIPES)
@pytest.mark.parametrize("captured", [False, True])
def test_overlapping_passes_do_not_interfere(weights: str, activations: str | None, captured: bool) -> None:
    """A kernel starts while the one before it ends, so passes of one layer run into each other on one stream."""
    layer = build(weights, activations)
    calls = [call(1 + index % 4, index) for index in range(12)]
    wanted = []
    for x, routing in calls:
        wanted.append(layer(x, routing=routing).clone())
        torch.cuda.synchronize()
    if not captured:
        found = [layer(x, routing=routing) for _ in range(20) for x, routing in calls]
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [layer(x, routing=routing) for _ in range(2) for x, routing in calls]
        for _ in range(10):
            graph.replay()
    torch.cuda.synchronize()
    for index, out in enumerate(found):
        assert torch.equal(out.nan_to_num(1.5), wanted[index % len(calls)].nan_to_num(1.5))
