"""Captured layers: every budget has the bits of eager calls, with padding, from several streams and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium import (
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    plan,
    probe,
)
from collegium.graphs import capture, capture_all
from collegium.testing.compare import heavy_tailed, random_experts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

E, H, INNER, K = 17, 256, 128, 3
BUDGETS = (1, 2, 8, 64, 512)
RECIPES = (
    ("mxfp4", "fp8_token"),
    ("mxfp4", None),
    ("nvfp4", "fp8_token"),
    ("fp8_block", "fp8_group128"),
    ("bf16", None),
    ("int4_group", None),
)


def layer_of(recipe: tuple[str, str | None], *, router: bool = True, shared: bool = True, seed: int = 1) -> MoELayer:
    weights, activations = recipe
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=K),
        weight_format=weights,
        shared=SharedSpec(intermediate_size=INNER) if shared else None,
    )
    limits = Limits(max_tokens=max(BUDGETS))
    problem = Problem(spec=spec, device=probe("cuda"), limits=limits, activation_format=activations, graph=True)
    experts = to_gpu(encode_experts(random_experts(E, 2, INNER, H, seed=seed), weights))
    extra = to_gpu(encode_experts(random_experts(1, 2, INNER, H, seed=seed + 1), weights))
    return MoELayer(
        experts,
        plan(problem, Overrides()),
        router=RouterWeights(weight=heavy_tailed(E, H, seed=seed + 2).cuda()) if router else None,
        shared=SharedWeights(experts=extra) if shared else None,
    )


def to_gpu(weights: Any) -> Any:
    return replace(weights, gate_up=weights.gate_up.to("cuda"), down=weights.down.to("cuda"))


def tokens_of(count: int, seed: int = 5) -> torch.Tensor:
    return heavy_tailed(count, H, seed=seed).cuda().bfloat16()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: "-".join(map(str, recipe)))
def test_graphs_equal_eager(recipe: Any) -> None:
    layer = layer_of(recipe)
    runner = capture(layer, BUDGETS)
    for turn, count in enumerate((512, 1, 3, 64, 65, 7, 0, 300, 2, 8)):
        x = tokens_of(count, seed=turn)
        assert runner(x).equal(layer(x)), count
    with pytest.raises(InputError):
        runner(tokens_of(513))


@pytest.mark.parametrize("routing_input", ["router_logits", "routing"])
def test_graphs_with_passed_routing(routing_input: Any) -> None:
    layer = layer_of(RECIPES[0], router=False)
    runner = capture(layer, BUDGETS, routing_input=routing_input)
    for turn, count in enumerate((5, 64, 1, 130)):
        x, logits = tokens_of(count, seed=turn), heavy_tailed(count, E, seed=turn + 50).cuda()
        inputs: dict[str, Any] = {"router_logits": logits}
        if routing_input == "routing":
            inputs = {"routing": layer.route(x, router_logits=logits)}
        assert runner(x, **inputs).equal(layer(x, **inputs)), count


def test_graphs_share_memory() -> None:
    """Twelve layers take hardly more graph memory than one."""
    layers = [layer_of(RECIPES[1], seed=seed) for seed in range(0, 36, 3)]
    for layer in layers:
        layer.warm_up()
    grown = []
    for group in (layers[:1], layers):
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        runners = capture_all(group, BUDGETS)
        grown.append(torch.cuda.memory_reserved() - before)
        x = tokens_of(33)
        assert [runner(x).equal(layer(x)) for runner, layer in zip(runners, group, strict=True)] == [True] * len(group)
        del runners
    assert grown[1] <= 2 * max(grown[0], 2 << 20), grown


def test_streams_and_threads() -> None:
    layer = layer_of(RECIPES[0])
    runner = capture(layer, BUDGETS)
    batches = [tokens_of(1 + 37 * turn % 200, seed=turn) for turn in range(24)]
    expected = [layer(x) for x in batches]
    torch.cuda.synchronize()

    def serve(start: int) -> list[bool]:
        stream = torch.cuda.Stream()
        equal = []
        with torch.cuda.stream(stream):
            equal.extend(runner(batches[index]).equal(expected[index]) for index in range(start, len(batches), 4))
        return equal

    with ThreadPoolExecutor(4) as pool:
        assert all(all(equal) for equal in pool.map(serve, range(4)))


def test_swap_after_capture() -> None:
    layer = layer_of(RECIPES[0], shared=False)
    capture(layer, BUDGETS)
    with pytest.raises(InputError):
        layer.swap(to_gpu(encode_experts(random_experts(E, 2, INNER, H, seed=9), "mxfp4")))
